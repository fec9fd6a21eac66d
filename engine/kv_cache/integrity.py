"""Recounts of who owns what, from scratch: run at every idle and in every test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.kv_cache.checkpoints import StateCheckpoints
from engine.kv_cache.prefix_cache import PrefixCache
from engine.sequence import Sequence, Status


def check_integrity(cache: PrefixCache, sequences: Iterable[Sequence]) -> None:
    """Raises AssertionError naming what is wrong with pool, tree or sequences."""
    owners: Counter[int] = Counter()
    for node in cache.nodes():
        owners[node.block_id] += 1
        if node.parent is not None and node.parent.children.get(node.key) is not node:
            raise AssertionError(f"block {node.block_id} is not a child of its parent")
    if any(count > 1 for count in owners.values()):
        raise AssertionError("a block is in the tree twice")
    known = list(sequences)
    for sequence in known:
        _check_sequence(sequence, cache.block_size, cache.holds_kv)
        owners.update(sequence.block_table)
    cache.pool.check_integrity(dict(owners))
    if cache.checkpoints is not None:
        _check_states(cache.checkpoints, known)


def _check_states(checkpoints: StateCheckpoints, sequences: Iterable[Sequence]) -> None:
    owners: Counter[int] = Counter(kept.slot for kept in checkpoints)
    if any(count > 1 for count in owners.values()):
        raise AssertionError("two checkpoints are in one slot")
    for sequence in sequences:
        state = sequence.state
        assert state is not None
        if (state.live is not None) != (sequence.status is Status.RUNNING):
            raise AssertionError("a running sequence has no state of its own, or another one has")
        if not state.is_at(sequence.token_ids[: sequence.cache_pos]):
            raise AssertionError(f"cache_pos is {sequence.cache_pos}, but the state held is another one")
        if state.live is not None:
            owners[state.live] += 1
        elif state.held is not None:
            owners[state.held.slot] += 1
    checkpoints.slots.check_integrity(dict(owners))


def _check_sequence(sequence: Sequence, block_size: int, holds_kv: bool) -> None:
    held = len(sequence.block_table) * block_size if holds_kv else len(sequence.token_ids)
    if not 0 <= sequence.cache_pos <= min(held, len(sequence.token_ids)):
        raise AssertionError(f"cache_pos {sequence.cache_pos} exceeds {held} slots or {len(sequence.token_ids)} ids")
    if len(set(sequence.block_table)) != len(sequence.block_table):
        raise AssertionError("a block stands twice in one block table")
    if len(sequence.nodes) != (sequence.cache_pos // block_size if holds_kv else 0):
        raise AssertionError("the full blocks of a sequence are not all in the tree")
    for index, node in enumerate(sequence.nodes):
        ids = tuple(sequence.token_ids[index * block_size : (index + 1) * block_size])
        if node.key != ids or node.block_id != sequence.block_table[index]:
            raise AssertionError(f"block {index} of a sequence holds other ids than its history says")
