"""The cache as a tree of full blocks: equal beginnings are stored once, whoever computed them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.kv_cache.block_pool import BlockPool, OutOfBlocks
from engine.kv_cache.checkpoints import Checkpoint, StateCheckpoints

BlockKey = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """One full block: its tokens, its place in the tree, and who computed it."""

    block_id: int
    key: BlockKey
    parent: Node | None
    session_id: str | None = None
    turn_id: str | None = None
    last_used: int = 0
    children: dict[BlockKey, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What others have computed of a prompt: its first `count` tokens, the full blocks that hold them, the state."""

    count: int
    path: list[Node]
    checkpoint: Checkpoint | None


class PrefixCache:
    """A node is keyed by its parent and its token ids, so equal keys mean equal K and V (up to rounding).

    The tree owns one reference to each of its blocks, each sequence that uses a block owns another. A block that only
    the tree owns and that has no children may be evicted; the least recently used goes first, so a prefix is eaten
    from its tail.

    A model with recurrent layers has `checkpoints` of their states beside the tree. One of nothing else has no K and V,
    so no blocks: `holds_kv` is false and the tree stays empty.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        checkpoints: StateCheckpoints | None = None,
        holds_kv: bool = True,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.checkpoints = checkpoints
        self.holds_kv = holds_kv
        self._roots: dict[BlockKey, Node] = {}
        self._clock = 0

    def match(self, token_ids: Sequence[int]) -> list[Node]:
        """The longest path of full blocks that `token_ids` starts with. Takes no reference."""
        path: list[Node] = []
        level = self._roots
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            node = level.get(tuple(token_ids[start : start + self.block_size]))
            if node is None:
                break
            path.append(node)
            level = node.children
        return path

    def shared(self, token_ids: Sequence[int]) -> SharedPrefix:
        """The longest prefix of a prompt that can be taken over; its last token stays to be run. Takes no reference.

        With a recurrent state that is where a state was kept, up to where the blocks reach.
        """
        path = self.match(token_ids[:-1])
        count = len(path) * self.block_size
        if self.checkpoints is None:
            return SharedPrefix(count, path, None)
        kept = self.checkpoints.newest(token_ids, count if self.holds_kv else len(token_ids) - 1)
        count = 0 if kept is None else kept.position
        return SharedPrefix(count, path[: -(-count // self.block_size)], kept)

    def insert(
        self, parent: Node | None, key: BlockKey, block_id: int, session_id: str | None, turn_id: str | None
    ) -> Node:
        """The node for this block; if an equal one exists already, that one, and `block_id` stays out of the tree."""
        level = parent.children if parent else self._roots
        node = level.get(key)
        if node is None:
            node = Node(block_id, key, parent, session_id, turn_id)
            self.pool.add_ref(block_id)
            level[key] = node
        self.touch([node])
        return node

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
        """Free up to `count` unused blocks, least recently used first; returns how many were freed."""
        heap = [(node.last_used, id(node), node) for node in self.nodes() if self._evictable(node)]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < count:
            node = heapq.heappop(heap)[2]
            self._remove(node)
            freed += 1
            if node.parent and self._evictable(node.parent):
                heapq.heappush(heap, (node.parent.last_used, id(node.parent), node.parent))
        return freed

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
        """Blocks that `evict` could free in all: unused ones with nothing but unused ones below them."""
        held: set[int] = set()
        unused = 0
        for node in reversed(list(self.nodes())):
            if self.pool.ref_count(node.block_id) > 1 or id(node) in held:
                if node.parent:
                    held.add(id(node.parent))
            else:
                unused += 1
        return unused

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before their children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _evictable(self, node: Node) -> bool:
        return not node.children and self.pool.ref_count(node.block_id) == 1

    def _remove(self, node: Node) -> None:
        level = node.parent.children if node.parent else self._roots
        del level[node.key]
        self.pool.release(node.block_id)
