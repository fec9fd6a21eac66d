"""The cache as a tree of full blocks: equal beginnings are stored once, whoever computed them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks
from engine.kv_cache.checkpoints import Checkpoint, StateCheckpoints
from engine.kv_cache.window import Windows
from kernels.layer_groups import LayerGroup

BlockKey = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """One full block of tokens: its place in the tree, who computed it, and the block of each group of layers.

    A group with a window may have given its block up (0); `fills` counts how often some group's came back.
    """

    block_ids: list[int]
    key: BlockKey
    parent: Node | None
    session_id: str | None = None
    turn_id: str | None = None
    last_used: int = 0
    fills: int = 0
    children: dict[BlockKey, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What others have computed of a prompt: its first `count` tokens, the full blocks that hold them, the state."""

    count: int
    path: list[Node]
    checkpoint: Checkpoint | None


class PrefixCache:
    """A node is keyed by its parent and its token ids, so equal keys mean equal K and V (up to rounding).

    The tree owns one reference to each of its blocks, each sequence that uses a block owns another. A node whose blocks
    only the tree owns and that has no children may be evicted; the least recently used goes first, so a prefix is eaten
    from its tail. Blocks of groups with a window may go alone, which leaves the node without them.

    A model with recurrent layers has `checkpoints` of their states beside the tree. One of nothing else has no K and V,
    so no blocks: `holds_kv` is false and the tree stays empty.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        checkpoints: StateCheckpoints | None = None,
        holds_kv: bool = True,
        groups: tuple[LayerGroup, ...] = (LayerGroup(),),
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.checkpoints = checkpoints
        self.holds_kv = holds_kv
        self.windows = Windows(groups if holds_kv else (), block_size)
        self._roots: dict[BlockKey, Node] = {}
        self._clock = 0

    def match(self, token_ids: Sequence[int]) -> list[Node]:
        """The longest path of full blocks that `token_ids` starts with, whichever groups have them. Takes no
        reference."""
        path: list[Node] = []
        level = self._roots
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            node = level.get(tuple(token_ids[start : start + self.block_size]))
            if node is None:
                break
            path.append(node)
            level = node.children
        return path

    def resume_point(self, path: Sequence[Node], count: int) -> int:
        """The greatest position up to `count`, which lies on `path`, from which a sequence could go on."""
        if not self.windows.any:
            return count
        return self.windows.resume_point(count, lambda group, index: path[index].block_ids[group] != NULL_BLOCK)

    def shared_blocks(self, token_ids: Sequence[int]) -> int:
        """How many of these ids a longer prompt could take over, by blocks alone."""
        path = self.match(token_ids)
        return self.resume_point(path, len(path) * self.block_size)

    def shared(self, token_ids: Sequence[int]) -> SharedPrefix:
        """The longest prefix of a prompt that can be taken over; its last token stays to be run. Takes no reference.

        With a recurrent state that is where a state was kept, up to where the blocks reach.
        """
        path = self.match(token_ids[:-1])
        count = len(path) * self.block_size
        if self.checkpoints is None:
            count = self.resume_point(path, count)
            return SharedPrefix(count, path[: count // self.block_size], None)
        for kept in self.checkpoints.along(token_ids, count if self.holds_kv else len(token_ids) - 1):
            if self.resume_point(path, kept.position) == kept.position:
                return SharedPrefix(kept.position, path[: -(-kept.position // self.block_size)], kept)
        return SharedPrefix(0, [], None)

    def insert(
        self,
        parent: Node | None,
        key: BlockKey,
        block_ids: Sequence[int],
        session_id: str | None,
        turn_id: str | None,
    ) -> Node:
        """The node for these blocks, one of each group. If there is one already, it keeps the blocks it has, and takes
        those that it lacks."""
        level = parent.children if parent else self._roots
        node = level.get(key)
        if node is None:
            node = level[key] = Node([NULL_BLOCK] * len(block_ids), key, parent, session_id, turn_id)
        for group, block_id in enumerate(block_ids):
            if block_id != NULL_BLOCK and node.block_ids[group] == NULL_BLOCK:
                self.pool.add_ref(block_id)
                node.block_ids[group] = block_id
                node.fills += 1
        self.touch([node])
        return node

    def let_go(self, path: Sequence[Node], index: int, group: int) -> None:
        """A sequence that moves on along `path` has no more use for this block of a group with a window: it is freed if
        nobody else has, and if no other branch of the tree begins where it would be needed."""
        node, size = path[index], self.block_size
        block_id = node.block_ids[group]
        if self._level(node).get(node.key) is not node:
            # A private one, which has no reference of its own; a fork may be letting go of what the session still has.
            if block_id != NULL_BLOCK and not self.pool.ref_count(block_id):
                node.block_ids[group] = NULL_BLOCK
            return
        if block_id == NULL_BLOCK or self.pool.ref_count(block_id) > 1:
            return
        for later in range(index, len(path)):
            if not self.windows.needs(group, index, (later + 1) * size):
                break
            if len(path[later].children) > 1:
                return
        self._give_up(node, group)

    def touch(self, path: Sequence[Node]) -> None:
        """Mark as used now; a child is never older than its parent."""
        self._clock += 1
        for node in path:
            node.last_used = self._clock

    def allocate(self) -> int:
        """A block from the pool, evicting if none is free. Raises `OutOfBlocks`."""
        if not self.pool.free_count and not self.evict(1):
            raise OutOfBlocks
        return self.pool.allocate()

    def evict(self, count: int) -> int:
        """Free `count` unused blocks, least recently used first, if there are as many; returns how many were freed. A
        node's blocks go together, so it may be a few more.

        Of equally old ones whole nodes go before single blocks of groups with a window in the midst of a path.
        """
        numbers = itertools.count()
        found = ((node, single) for node in self.nodes() for single in self._removals(node))
        heap = [(node.last_used, single, next(numbers), node) for node, single in found]
        heapq.heapify(heap)
        freed, free_before = 0, self.pool.free_count
        while heap and freed < count:
            _, single, _, node = heapq.heappop(heap)
            if self._level(node).get(node.key) is not node or single not in self._removals(node):
                continue
            if single:
                self._give_up(node, next(g for g, b in enumerate(node.block_ids) if self._is_spare(g, b)))
                again = [node]
            else:
                self._remove(node)
                again = [node.parent] if node.parent else []
            freed = self.pool.free_count - free_before
            for other in again:
                for kind in self._removals(other):
                    heapq.heappush(heap, (other.last_used, kind, next(numbers), other))
        return freed

    def _removals(self, node: Node) -> tuple[bool, ...]:
        """How a node may shrink: (False,) as a whole, (True,) by a single block, () not at all."""
        if self._evictable(node):
            return (False,)
        return (True,) if any(self._is_spare(g, b) for g, b in enumerate(node.block_ids)) else ()

    def _is_spare(self, group: int, block_id: int) -> bool:
        """A block that may go without its node."""
        return block_id != NULL_BLOCK and not self.windows.is_whole(group) and self.pool.ref_count(block_id) == 1

    def forget(self, session_id: str | None, within: Sequence[Node] | None = None) -> None:
        """Remove every unused block that this session computed (its chat was deleted); None: that belongs to none.

        `within`: only blocks of this path.
        """
        for node in reversed(list(self.nodes()) if within is None else within):
            if node.session_id == session_id and self._evictable(node):
                self._remove(node)
        if self.checkpoints is not None and session_id is not None:
            self.checkpoints.forget(session_id)

    def prune(self, path: Sequence[Node], turn_id: str | None) -> None:
        """Remove the tail of a path as far as it is unused and was computed by this turn."""
        for node in reversed(path):
            if node.turn_id != turn_id or not self._evictable(node):
                return
            self._remove(node)

    def expel(self, node: Node) -> None:
        """Take a block and all below it out of the tree. Whoever has them in a sequence keeps them, as private ones."""
        below = [node]
        while below:
            gone = below.pop()
            below += gone.children.values()
            self._remove(gone)

    def evictable_count(self) -> int:
        """Blocks that `evict` could free in all: those of unused nodes with nothing but unused ones below them, and
        elsewhere the unused ones of groups with a window."""
        held: set[int] = set()
        unused = 0
        for node in reversed(list(self.nodes())):
            if id(node) in held or not self._is_unused(node):
                unused += sum(self._is_spare(g, b) for g, b in enumerate(node.block_ids))
                if node.parent:
                    held.add(id(node.parent))
            else:
                unused += sum(block_id != NULL_BLOCK for block_id in node.block_ids)
        return unused

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before their children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _evictable(self, node: Node) -> bool:
        return not node.children and self._is_unused(node)

    def _is_unused(self, node: Node) -> bool:
        return all(block_id == NULL_BLOCK or self.pool.ref_count(block_id) == 1 for block_id in node.block_ids)

    def _give_up(self, node: Node, group: int) -> None:
        self.pool.release(node.block_ids[group])
        node.block_ids[group] = NULL_BLOCK

    def _level(self, node: Node) -> dict[BlockKey, Node]:
        return node.parent.children if node.parent else self._roots

    def _remove(self, node: Node) -> None:
        del self._level(node)[node.key]
        for block_id in node.block_ids:
            if block_id != NULL_BLOCK:
                self.pool.release(block_id)
