"""Keeping the pool's memory dense: how much of it is empty, and moving blocks down so that extents become free."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv_cache.prefix_cache import PrefixCache
from engine.sequence import Sequence

MOST_EMPTY = 0.3
"""Share of the reserved blocks that may be free before blocks are moved."""


def empty_slots(cache: PrefixCache, sequences: Iterable[Sequence], reserved_blocks: int) -> int:
    """Slots for tokens that have memory and hold none: in blocks that are free, and behind each sequence's last token.

    Blocks that only the tree holds count as full: a prompt that begins with their tokens uses them.
    """
    size = cache.block_size
    open_ended = sum(len(sequence.block_table) * size - sequence.cache_pos for sequence in sequences)
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
            node.block_id = moves.get(node.block_id, node.block_id)
        for sequence in sequences:
            sequence.block_table = [moves.get(block_id, block_id) for block_id in sequence.block_table]
            for node, block_id in zip(sequence.nodes, sequence.block_table, strict=False):
                node.block_id = block_id  # also of those that are not in the tree
    return len(moves)
