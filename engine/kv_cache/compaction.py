"""Keeping the pool's memory dense: how much of it is empty, and moving blocks down so that extents become free."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv_cache.prefix_cache import PrefixCache
from engine.sequence import Sequence

MOST_EMPTY = 0.3
"""Share of the reserved blocks that may be free before blocks are moved."""


def empty_slots(cache: PrefixCache, sequences: Iterable[Sequence], reserved_blocks: int) -> int:
    """Slots for tokens that have memory and hold none: in blocks that are free, and behind each sequence's last token.
    Each group of layers has slots of its own.

    Blocks that only the tree holds count as full: a prompt that begins with their tokens uses them.
    """
    size = cache.block_size
    open_ended = sum(
        len(table) * size - sequence.cache_pos for sequence in sequences for table in sequence.block_tables
    )
    return (reserved_blocks - cache.pool.used_count) * size + open_ended


def is_sparse(cache: PrefixCache, reserved_blocks: int, blocks_per_extent: int) -> bool:
    """Whether so many reserved blocks are free that moving the others down is worth it, and would free an extent."""
    needed = -(-(cache.pool.used_count + 1) // blocks_per_extent) * blocks_per_extent
    free = reserved_blocks - cache.pool.used_count - 1
    return needed < reserved_blocks and free > MOST_EMPTY * reserved_blocks


def compact(cache: PrefixCache, sequences: Iterable[Sequence]) -> int:
    """Move the highest blocks to the lowest free ids, by pending copies, and rename them in tree and tables.

    The number of blocks that move. No other copies may be pending, because these may be carried out in any order.
    """
    moves = cache.pool.compact()
    if moves:
        for node in cache.nodes():
            node.block_ids = [moves.get(block_id, block_id) for block_id in node.block_ids]
        for sequence in sequences:
            sequence.blocks.rename(moves)
            for node in sequence.nodes:  # also those that are not in the tree
                node.block_ids = [moves.get(block_id, block_id) for block_id in node.block_ids]
    return len(moves)
