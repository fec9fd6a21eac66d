"""The blocks of one sequence: a table for each group of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.prefix_cache import Node, PrefixCache
from engine.kv_cache.window import BlockPlace


class BlockTables:
    """`tables[group]` is indexed by position // block size; an entry that is not held is the null block.

    A group with a window holds what is needed to go on at the sequence's position and, as long as memory allows, at the
    `anchors`: positions that it may be sent back to.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.tables: list[list[int]] = [[] for _ in cache.windows.groups]
        self.anchors: tuple[int, ...] = ()
        self._cache = cache

    def __len__(self) -> int:
        """Length of the longest table."""
        return max(map(len, self.tables), default=0)

    def __iter__(self) -> Iterator[int]:
        """Every block held, of all groups."""
        return (block_id for table in self.tables for block_id in table if block_id != NULL_BLOCK)

    @property
    def count(self) -> int:
        """Blocks held, of all groups."""
        return sum(1 for _ in self)

    @property
    def widest(self) -> list[int]:
        """The table of the group that keeps most; empty where nothing attends."""
        return self.tables[self._cache.windows.widest] if self.tables else []

    def holds(self, group: int, index: int) -> bool:
        return index < len(self.tables[group]) and self.tables[group][index] != NULL_BLOCK

    def held_tokens(self, group: int, cache_pos: int) -> int:
        """How many of the first `cache_pos` positions this group has."""
        size = self._cache.block_size
        starts = (index * size for index, block_id in enumerate(self.tables[group]) if block_id != NULL_BLOCK)
        return sum(min(size, cache_pos - start) for start in starts if start < cache_pos)

    def places(self, cache_pos: int) -> list[BlockPlace]:
        """Group and index of each block that holds some of the first `cache_pos` positions, by index."""
        end = -(-cache_pos // self._cache.block_size)
        return [(group, index) for index in range(end) for group in range(len(self.tables)) if self.holds(group, index)]

    def held_point(self, count: int) -> int:
        """The greatest position up to `count` at which every group has what it needs."""
        return self._cache.windows.resume_point(count, self.holds) if self._cache.windows.any else count

    def take(self, path: SequenceOf[Node], count: int) -> None:
        """In place of all that is held, the tree's blocks that are needed to go on at `count`."""
        needs = self._cache.windows.needs
        tables = [
            [node.block_ids[group] if needs(group, index, count) else NULL_BLOCK for index, node in enumerate(path)]
            for group in range(len(self.tables))
        ]
        self._replace(tables)

    def share(self, other: BlockTables, kept: int) -> None:
        """In place of all that is held, the first `kept` entries of another sequence's tables."""
        self._replace([table[:kept] for table in other.tables])
        self.anchors = other.anchors

    def _replace(self, tables: list[list[int]]) -> None:
        for table in tables:
            for block_id in table:
                if block_id != NULL_BLOCK:
                    self._cache.pool.add_ref(block_id)
        self.drop(0)
        self.tables = tables

    def reserve(self, token_count: int, step_end: int | None) -> None:
        """As `Sequence.reserve`."""
        size, windows = self._cache.block_size, self._cache.windows
        for group, table in enumerate(self.tables):
            end = token_count if step_end is None or windows.is_whole(group) else min(token_count, step_end)
            while len(table) * size < end:
                table.append(self._cache.allocate())

    def drop(self, kept: int) -> None:
        """Give back all but the first `kept` entries of each table; the last first."""
        for table in self.tables:
            for block_id in reversed(table[kept:]):
                if block_id != NULL_BLOCK:
                    self._cache.pool.release(block_id)
            del table[kept:]

    def own_last(self) -> None:
        """Replace the last block of each group, where it is shared, by a copy. Raises `OutOfBlocks`."""
        pool = self._cache.pool
        for table in self.tables:
            shared = table[-1]
            if pool.ref_count(shared) > 1:
                own = self._cache.allocate()
                pool.pending_copies.append((shared, own))
                pool.release(shared)
                table[-1] = own

    def enter_tree(self, index: int, node: Node) -> bool:
        """Use the node's block in each group that had another at `index`; True if there was one."""
        changed = False
        for table, kept in zip(self.tables, node.block_ids, strict=True):
            if table[index] not in (NULL_BLOCK, kept):
                self._cache.pool.add_ref(kept)
                self._cache.pool.release(table[index])
                table[index], changed = kept, True
        return changed

    def move_on(self, before: int, cache_pos: int, nodes: SequenceOf[Node]) -> None:
        """Give up what windows pass when the sequence moves from `before` to `cache_pos`."""
        for group in range(len(self.tables)):
            self._give_up(group, self._cache.windows.passed(group, before, cache_pos), cache_pos, nodes)

    def keep_for(self, anchors: tuple[int, ...], cache_pos: int, nodes: SequenceOf[Node]) -> None:
        """From now on these are the anchors; what was held only for others is given up."""
        self.anchors = anchors if self._cache.windows.any else ()
        for group, table in enumerate(self.tables):
            if not self._cache.windows.is_whole(group):
                self._give_up(group, range(len(table)), cache_pos, nodes)

    def _give_up(self, group: int, indices: Iterable[int], cache_pos: int, nodes: SequenceOf[Node]) -> None:
        """Of these full blocks, those that nothing says to keep."""
        table, windows = self.tables[group], self._cache.windows
        for index in indices:
            if table[index] != NULL_BLOCK and not windows.keeps(group, index, cache_pos, self.anchors):
                self._cache.pool.release(table[index])
                table[index] = NULL_BLOCK
                self._cache.let_go(nodes, index, group)

    def rename(self, moves: dict[int, int]) -> None:
        """Blocks were moved: old id -> new id."""
        self.tables = [[moves.get(block_id, block_id) for block_id in table] for table in self.tables]
