"""One conversation as the engine sees it: its ids, its blocks, and how much of it is in the cache."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf

from engine.kv_cache.block_pool import OutOfBlocks
from engine.kv_cache.block_tables import BlockTables
from engine.kv_cache.origin import Origin
from engine.kv_cache.prefix_cache import Node, PrefixCache
from engine.kv_cache.sequence_state import SequenceState


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    IDLE = "idle"
    FINISHED = "finished"


class Sequence:
    """Token ids and the blocks that hold their K and V. Positions `0 .. cache_pos - 1` are in the cache.

    The leading full blocks belong to nodes of the prefix cache (`nodes`), the last, partly filled ones are this
    sequence's own. A block with more than one owner is never written: cutting into one copies it first. Cutting goes
    back to where each group of layers has the window before.

    With recurrent layers `state` is what they remember of the first `cache_pos` tokens. It can't be cut, so cutting
    goes back to where a state was kept, and K and V are cut there too.
    """

    def __init__(self, cache: PrefixCache, session_id: str | None = None) -> None:
        self.session_id = session_id
        self.turn_id: str | None = None
        self.token_ids: list[int] = []
        self.blocks = BlockTables(cache)
        self.block_turns: list[str | None] = []
        self.nodes: list[Node] = []
        self.cache_pos = 0
        self.origins = bytearray()
        """Of each cached position, an `Origin`."""
        self.evicted_from = 0
        self.status = Status.IDLE
        self.places = 1
        """Among the running sequences; more for one that will be forked into as many."""
        self.private_from: int | None = None
        """Values from this position on are no work of the model that others may take over: their blocks, and states
        made after them, stay out of the tree and of the kept states."""
        self._stops: set[int] = set()
        self.state = SequenceState(cache.checkpoints) if cache.checkpoints is not None else None
        self._cache = cache

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def block_tables(self) -> list[list[int]]:
        """One for each group of layers (`BlockTables`)."""
        return self.blocks.tables

    @property
    def block_table(self) -> list[int]:
        """That of the group that keeps most, to be shown."""
        return self.blocks.widest

    @property
    def remaining(self) -> int:
        """Tokens known but not yet in the cache; 1 while decoding (the last sampled one)."""
        return len(self.token_ids) - self.cache_pos

    @property
    def holds_cache(self) -> bool:
        """Whether `release_blocks` would free something."""
        return self.blocks.count > 0 or (self.state is not None and self.state.held is not None)

    @property
    def free_slots(self) -> int:
        """Slots past the known tokens that are reserved or could be without taking a block from anybody."""
        pool, known = self._cache.pool, len(self.token_ids)
        blocks = max(pool.free_count, 0) // max(len(self.block_tables), 1)
        return max((len(self.blocks) + blocks) * self._cache.block_size - known, 0)

    @property
    def tree_blocks(self) -> int:
        """Leading blocks that are nodes of the tree; full ones behind them are private."""
        return (
            len(self.nodes) if self.private_from is None else min(len(self.nodes), self.private_from // self.block_size)
        )

    def next_chunk(self, most: int) -> int:
        """Tokens for the next step, at most `most`: a prefill stops where its state is to be kept, or where another
        prompt parts from it."""
        count = min(self.remaining, most)
        stops = (*(self.state.wanted if self.state is not None else ()), *self._stops)
        return min([count, *(stop - self.cache_pos for stop in stops if stop > self.cache_pos)])

    def will_share(self, count: int) -> int:
        """How many of the first `count` tokens others can take over once the running prefill is through."""
        if self.state is None:
            return count - count % self.block_size
        return max((stop for stop in self.state.wanted if self.cache_pos < stop <= count), default=0)

    def stop_at(self, position: int) -> None:
        """End a chunk there, so that another sequence may go on from it while the window before it is still held."""
        if self._cache.windows.any:
            self._stops.add(position)

    def resume_point(self, count: int) -> int:
        """Where cutting to `count` tokens would end up."""
        count = min(count, self.cache_pos)
        while True:
            kept = count
            if self.state is not None:
                kept = self.state.resume_point(self.token_ids, count, self.cache_pos)
            count = self.blocks.held_point(kept)
            if count == kept:
                return count

    def set_tokens(self, token_ids: SequenceOf[int]) -> None:
        """Replace the ids; the cache must have been cut to what they share with the old ones."""
        self.token_ids = list(token_ids)

    def truncate(self, count: int) -> None:
        """Keep the first `count` cached tokens, or as many as `resume_point` says. May keep up to a block less if a
        shared block can't be copied."""
        count = self.resume_point(count)
        if self.state is not None:
            self.state.cut(self.token_ids, count, self.cache_pos)
        if count == self.cache_pos:
            return
        full, rest = divmod(count, self._cache.block_size)
        self._drop_blocks(full + (1 if rest else 0))
        del self.nodes[full:]
        del self.origins[count:]
        self.cache_pos = count
        if self.private_from is not None and count <= self.private_from:
            self.private_from = None
        if rest:
            self._own_last_block()

    def adopt_prefix(self) -> None:
        """Take blocks of the tree where they hold more of `token_ids` than its own; one token stays to be run."""
        shared = self._cache.shared(self.token_ids)
        count, path = shared.count, shared.path
        self._cache.touch(path)
        if count <= self.cache_pos:
            return
        self.blocks.take(path, count)
        self.block_turns = [node.turn_id for node in path]
        self.nodes = path[: count // self._cache.block_size]
        self.cache_pos = count
        self.origins = bytearray([Origin.SHARED]) * count
        self.private_from = None
        if self.state is not None:
            self.state.hold(shared.checkpoint)
        if len(self.nodes) < len(path):
            self._own_last_block()

    def begin_turn(self) -> None:
        """A prompt is about to be run. The windows before what is new in it, and before the reply, will be kept; those
        of the turn before no longer, unless this one takes its place."""
        self._stops.clear()
        before = self.blocks.anchors or (self.cache_pos, -1)
        start = before[0] if before[0] <= self.cache_pos <= before[-1] else self.cache_pos
        self.blocks.keep_for((start, len(self.token_ids) - 1), self.cache_pos, self.nodes)

    def drop_spare(self) -> bool:
        """Give up what is held only for going back; False if that is nothing."""
        before = self.blocks.count if self.blocks.anchors else 0
        self.blocks.keep_for((), self.cache_pos, self.nodes)
        return before > self.blocks.count

    def reserve(self, token_count: int, step_end: int | None = None) -> None:
        """Have blocks for the first `token_count` positions, in groups with a window only for those before `step_end`
        if it is given, and a live state. Raises `OutOfBlocks`; keeps what it got."""
        try:
            self.blocks.reserve(token_count, step_end)
        finally:
            self.block_turns += [self.turn_id] * (len(self.blocks) - len(self.block_turns))
        if self.state is not None:
            self.state.begin(self.token_ids, self.cache_pos, self._cache.block_size)

    def advance(self, count: int, origin: Origin = Origin.PREFILL) -> None:
        """`count` more tokens are in the cache; blocks that became full join the tree, and those that windows have
        passed are given up."""
        before = self.cache_pos
        self.cache_pos += count
        self.origins += bytearray([origin]) * count
        if self.state is not None and self.cache_pos in self.state.wanted and self.private_from is None:
            self.state.save(self.token_ids[: self.cache_pos], self.session_id)
        while self._cache.holds_kv and (len(self.nodes) + 1) * self._cache.block_size <= self.cache_pos:
            self._enter_tree(len(self.nodes))
        self.blocks.move_on(before, self.cache_pos, self.nodes)

    def _enter_tree(self, index: int) -> None:
        size = self._cache.block_size
        key = tuple(self.token_ids[index * size : (index + 1) * size])
        parent = self.nodes[-1] if self.nodes else None
        own = [table[index] for table in self.block_tables]
        if self.private_from is not None and (index + 1) * size > self.private_from:
            self.nodes.append(Node(own, key, parent, self.session_id, self.block_turns[index]))
            return
        node = self._cache.insert(parent, key, own, self.session_id, self.block_turns[index])
        if self.blocks.enter_tree(index, node):
            self.block_turns[index] = node.turn_id
            self.origins[index * size : (index + 1) * size] = bytearray([Origin.SHARED]) * size
        self.nodes.append(node)

    def trim(self) -> None:
        """Give back the blocks past the last cached token: they were reserved for what did not come."""
        self._drop_blocks(-(-self.cache_pos // self._cache.block_size))

    def keep_private(self, position: int) -> None:
        """Let nobody else take over what stands from `position` on. Full blocks from there on, which must be out of the
        tree or on their way, become nodes of this sequence alone."""
        self.private_from = position if self.private_from is None else min(position, self.private_from)
        for index in range(self.tree_blocks, len(self.nodes)):
            node, parent = self.nodes[index], self.nodes[index - 1] if index else None
            own = [table[index] for table in self.block_tables]
            self.nodes[index] = Node(own, node.key, parent, node.session_id, node.turn_id)

    def fork(self, session_id: str | None, token_count: int) -> Sequence:
        """A new sequence with the first `token_count` cached tokens, as `truncate` would keep them: full blocks and
        the state are shared, the last block is copied."""
        twin = Sequence(self._cache, session_id)
        count = self._fork_point(twin, min(token_count, self.cache_pos))
        kept = -(-count // self._cache.block_size)
        twin.blocks.share(self.blocks, kept)
        twin.block_turns = self.block_turns[:kept]
        twin.nodes = self.nodes[: count // self._cache.block_size]
        twin.token_ids = self.token_ids[:count]
        twin.cache_pos = count
        twin.origins = bytearray([Origin.SHARED]) * count
        if self.private_from is not None and self.private_from < count:
            twin.private_from = self.private_from
        if len(twin.nodes) < kept:
            twin._own_last_block()
        return twin

    def _fork_point(self, twin: Sequence, count: int) -> int:
        """The last position up to `count` from which the twin can go on; it holds the state there."""
        if self.state is None or twin.state is None:
            return self.blocks.held_point(count)
        if count == self.cache_pos and self.private_from is None:
            self.state.save(self.token_ids[:count], self.session_id)
        while True:
            kept = twin.state.resume(self.token_ids, count)
            count = self.blocks.held_point(kept)
            if count == kept:
                return count

    def park(self) -> None:
        """The turn is over: the state is kept where it stands, unless the last, partly filled block that belongs to it
        is about to go."""
        passing = self.session_id is None and self._cache.holds_kv
        if self.state is not None and not passing:
            self.state.park(self.token_ids[: self.cache_pos], self.session_id, self.private_from is not None)

    def distrust_state(self) -> None:
        """A step failed and what it made of the live state is worth nothing; `truncate` then finds an earlier one."""
        if self.state is not None and self.state.live is not None:
            self.state.drop()

    def touch(self) -> None:
        """Mark the blocks as used now, so that others are evicted first."""
        self._cache.touch(self.nodes)

    def release_blocks(self) -> None:
        """Give every block back; full ones stay in the tree until evicted. Remembers how much was held."""
        self.evicted_from = max(self.evicted_from, self.cache_pos)
        self.drop_spare()
        self._drop_blocks(0)
        if self.state is not None:
            self.state.drop()
        self.nodes = []
        self.cache_pos = 0
        self.origins.clear()
        self.private_from = None

    def discard(self, kept: int) -> None:
        """Give every block back for good: what this turn computed past the first `kept` tokens leaves the tree too, as
        far as nobody else uses it."""
        nodes = self.nodes[kept // self._cache.block_size : self.tree_blocks]
        self.release_blocks()
        self._cache.prune(nodes, self.turn_id)

    def _drop_blocks(self, kept: int) -> None:
        self.blocks.drop(kept)
        del self.block_turns[kept:]

    def _own_last_block(self) -> None:
        """Replace shared last blocks by copies of our own; if they can't be had, do without."""
        try:
            self.blocks.own_last()
        except OutOfBlocks:
            self.truncate(self.cache_pos - self.cache_pos % self._cache.block_size)
