"""Recounts of who owns what, from scratch: run at every idle and in every test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.kv_cache.prefix_cache import PrefixCache
from engine.sequence import Sequence


def check_integrity(cache: PrefixCache, sequences: Iterable[Sequence]) -> None:
    """Raises AssertionError naming what is wrong with pool, tree or sequences."""
    owners: Counter[int] = Counter()
    for node in cache.nodes():
        owners[node.block_id] += 1
        if node.parent is not None and node.parent.children.get(node.key) is not node:
            raise AssertionError(f"block {node.block_id} is not a child of its parent")
    if any(count > 1 for count in owners.values()):
        raise AssertionError("a block is in the tree twice")
    for sequence in sequences:
        _check_sequence(sequence, cache.block_size)
        owners.update(sequence.block_table)
    cache.pool.check_integrity(dict(owners))


def _check_sequence(sequence: Sequence, block_size: int) -> None:
    held = len(sequence.block_table) * block_size
    if not 0 <= sequence.cache_pos <= min(held, len(sequence.token_ids)):
        raise AssertionError(f"cache_pos {sequence.cache_pos} exceeds {held} slots or {len(sequence.token_ids)} ids")
    if len(set(sequence.block_table)) != len(sequence.block_table):
        raise AssertionError("a block stands twice in one block table")
    if len(sequence.nodes) != sequence.cache_pos // block_size:
        raise AssertionError("the full blocks of a sequence are not all in the tree")
    for index, node in enumerate(sequence.nodes):
        ids = tuple(sequence.token_ids[index * block_size : (index + 1) * block_size])
        if node.key != ids or node.block_id != sequence.block_table[index]:
            raise AssertionError(f"block {index} of a sequence holds other ids than its history says")
