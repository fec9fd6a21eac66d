"""Who owns which block: ids and reference counts only, no tensors."""

from __future__ import annotations

import heapq

NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """No block is free. Callers evict, wait or preempt; it never reaches a person."""


class BlockPool:
    """Hands out block ids 1 .. `limit - 1` and counts their owners. Block 0 is the null block, used as padding.

    The lowest free id is given first, so that used blocks stay together at the bottom and whole extents at the top can
    be given back. `high_water` is one more than the highest id in use since the last `trim()`: the tensors must reach
    that far. `pending_copies` are block copies (source, target) to be carried out before the next step writes.
    """

    def __init__(self, limit: int) -> None:
        if limit < 2:
            raise ValueError("a pool needs the null block and at least one more")
        self.limit = limit
        self.high_water = 1
        self.pending_copies: list[tuple[int, int]] = []
        self._ref_counts: dict[int, int] = {}
        self._free: list[int] = []

    @property
    def used_count(self) -> int:
        return len(self._ref_counts)

    @property
    def free_count(self) -> int:
        return self.limit - 1 - self.used_count

    def allocate(self) -> int:
        """A block with one owner. Raises `OutOfBlocks`."""
        if self._free:
            block_id = heapq.heappop(self._free)
        elif self.high_water < self.limit:
            block_id = self.high_water
            self.high_water += 1
        else:
            raise OutOfBlocks
        self._ref_counts[block_id] = 1
        return block_id

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts.get(block_id, 0)

    def add_ref(self, block_id: int) -> None:
        if block_id not in self._ref_counts:
            raise ValueError(f"block {block_id} is free")
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop one owner; the last one frees the block."""
        count = self._ref_counts[block_id] - 1
        if count:
            self._ref_counts[block_id] = count
            return
        del self._ref_counts[block_id]
        heapq.heappush(self._free, block_id)

    def trim(self) -> int:
        """Lower `high_water` past free blocks at the top; returns it. The tensors above may then be given back."""
        self.high_water = max(self._ref_counts, default=0) + 1
        self._free = [block_id for block_id in self._free if block_id < self.high_water]
        heapq.heapify(self._free)
        return self.high_water

    def compact(self) -> dict[int, int]:
        """Give the highest used blocks the lowest free ids, their content by pending copies: old id -> new id.

        Whoever names a block has to rename it (`engine.kv_cache.compaction`).
        """
        moves: dict[int, int] = {}
        for source, target in zip(sorted(self._ref_counts, reverse=True), sorted(self._free), strict=False):
            if target > source:
                break
            self._ref_counts[target] = self._ref_counts.pop(source)
            moves[source] = target
        self.pending_copies += moves.items()
        self._free = sorted((set(self._free) - set(moves.values())) | moves.keys())
        return moves

    def take_copies(self) -> list[tuple[int, int]]:
        """The pending copies, in order; they count as done from here on."""
        copies, self.pending_copies = self.pending_copies, []
        return copies

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Recount from scratch: `owners` maps block id to the owners found by walking sequences and tree."""
        if owners != self._ref_counts:
            raise AssertionError(f"reference counts {self._ref_counts} differ from the owners found {owners}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        if free & owners.keys() or NULL_BLOCK in owners or NULL_BLOCK in free:
            raise AssertionError("a block is both free and owned, or the null block is in use")
        if free | owners.keys() != set(range(1, self.high_water)):
            raise AssertionError("a block below the high-water mark is neither free nor owned")
