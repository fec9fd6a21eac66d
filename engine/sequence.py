"""One conversation as the engine sees it: its ids, its blocks, and how much of it is in the cache."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf

from engine.kv_cache.block_pool import OutOfBlocks
from engine.kv_cache.prefix_cache import Node, PrefixCache


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    IDLE = "idle"
    FINISHED = "finished"


def common_prefix_len(left: SequenceOf[int], right: SequenceOf[int]) -> int:
    """How many leading ids are equal. Compares halves, so long equal histories cost a few slice comparisons."""
    left, right = tuple(left), tuple(right)
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Sequence:
    """Token ids and the blocks that hold their K and V. Positions `0 .. cache_pos - 1` are in the cache.

    The leading full blocks are nodes of the prefix cache (`nodes`), the last, partly filled block is this sequence's
    own. A block with more than one owner is never written: cutting into one copies it first.
    """

    def __init__(self, cache: PrefixCache, session_id: str | None = None) -> None:
        self.session_id = session_id
        self.turn_id: str | None = None
        self.token_ids: list[int] = []
        self.block_table: list[int] = []
        self.block_turns: list[str | None] = []
        self.nodes: list[Node] = []
        self.cache_pos = 0
        self.evicted_from = 0
        self.status = Status.IDLE
        self.places = 1
        """Among the running sequences; more for one that will be forked into as many."""
        self._cache = cache

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def remaining(self) -> int:
        """Tokens known but not yet in the cache; 1 while decoding (the last sampled one)."""
        return len(self.token_ids) - self.cache_pos

    def set_tokens(self, token_ids: SequenceOf[int]) -> None:
        """Replace the ids; the cache must have been cut to what they share with the old ones."""
        self.token_ids = list(token_ids)

    def truncate(self, count: int) -> None:
        """Keep the first `count` cached tokens. May keep up to a block less if a shared block can't be copied."""
        if count >= self.cache_pos:
            return
        size = self._cache.block_size
        full, rest = divmod(count, size)
        kept = full + (1 if rest else 0)
        self._drop_blocks(kept)
        if rest and self._cache.pool.ref_count(self.block_table[full]) > 1 and not self._own_last_block():
            count = full * size
        del self.nodes[count // size :]
        self.cache_pos = count

    def adopt_prefix(self) -> None:
        """Take blocks of the tree where they hold more of `token_ids` than its own; one token stays to be run."""
        path = self._cache.match(self.token_ids[:-1])
        self._cache.touch(path)
        size = self._cache.block_size
        if len(path) * size <= self.cache_pos:
            return
        for node in path:
            self._cache.pool.add_ref(node.block_id)
        self._drop_blocks(0)
        self.block_table = [node.block_id for node in path]
        self.block_turns = [node.turn_id for node in path]
        self.nodes = path
        self.cache_pos = len(path) * size

    def reserve(self, token_count: int) -> None:
        """Have blocks for the first `token_count` positions. Raises `OutOfBlocks`; keeps what it got."""
        while len(self.block_table) * self._cache.block_size < token_count:
            self.block_table.append(self._cache.allocate())
            self.block_turns.append(self.turn_id)

    def advance(self, count: int) -> None:
        """`count` more tokens are in the cache; blocks that became full join the tree."""
        self.cache_pos += count
        size = self._cache.block_size
        while (len(self.nodes) + 1) * size <= self.cache_pos:
            index = len(self.nodes)
            key = tuple(self.token_ids[index * size : (index + 1) * size])
            parent = self.nodes[-1] if self.nodes else None
            block_id = self.block_table[index]
            node = self._cache.insert(parent, key, block_id, self.session_id, self.block_turns[index])
            if node.block_id != block_id:
                self._cache.pool.add_ref(node.block_id)
                self._cache.pool.release(block_id)
                self.block_table[index] = node.block_id
                self.block_turns[index] = node.turn_id
            self.nodes.append(node)

    def fork(self, session_id: str | None, token_count: int) -> Sequence:
        """A new sequence with the first `token_count` cached tokens: full blocks shared, the last one copied."""
        twin = Sequence(self._cache, session_id)
        count = min(token_count, self.cache_pos)
        kept = -(-count // self._cache.block_size)
        for block_id in self.block_table[:kept]:
            self._cache.pool.add_ref(block_id)
        twin.block_table = self.block_table[:kept]
        twin.block_turns = self.block_turns[:kept]
        twin.nodes = self.nodes[: count // self._cache.block_size]
        twin.token_ids = self.token_ids[:count]
        twin.cache_pos = count
        if count % self._cache.block_size and not twin._own_last_block():
            twin.truncate(count - count % self._cache.block_size)
        return twin

    def touch(self) -> None:
        """Mark the blocks as used now, so that others are evicted first."""
        self._cache.touch(self.nodes)

    def release_blocks(self) -> None:
        """Give every block back; full ones stay in the tree until evicted. Remembers how much was held."""
        self.evicted_from = max(self.evicted_from, self.cache_pos)
        self._drop_blocks(0)
        self.nodes = []
        self.cache_pos = 0

    def discard(self, kept: int) -> None:
        """Give every block back for good: what this turn computed past the first `kept` tokens leaves the tree too, as
        far as nobody else uses it."""
        nodes = self.nodes[kept // self._cache.block_size :]
        self.release_blocks()
        self._cache.prune(nodes, self.turn_id)

    def _drop_blocks(self, kept: int) -> None:
        for block_id in reversed(self.block_table[kept:]):
            self._cache.pool.release(block_id)
        del self.block_table[kept:]
        del self.block_turns[kept:]

    def _own_last_block(self) -> bool:
        """Replace the shared last block by a copy of our own; False (block dropped) if none can be had."""
        shared = self.block_table[-1]
        try:
            own = self._cache.allocate()
        except OutOfBlocks:
            self._drop_blocks(len(self.block_table) - 1)
            return False
        self._cache.pool.pending_copies.append((shared, own))
        self._cache.pool.release(shared)
        self.block_table[-1] = own
        return True
