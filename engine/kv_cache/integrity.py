"""Recounts of who owns what, from scratch: run at every idle and in every test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.checkpoints import StateCheckpoints
from engine.kv_cache.prefix_cache import PrefixCache
from engine.sequence import Sequence, Status


def check_integrity(cache: PrefixCache, sequences: Iterable[Sequence]) -> None:
    """Raises AssertionError naming what is wrong with pool, tree or sequences."""
    owners: Counter[int] = Counter()
    for node in cache.nodes():
        owners.update(block_id for block_id in node.block_ids if block_id != NULL_BLOCK)
        if node.parent is not None and node.parent.children.get(node.key) is not node:
            raise AssertionError(f"the node of blocks {node.block_ids} is not a child of its parent")
        if any(b == NULL_BLOCK and cache.windows.is_whole(group) for group, b in enumerate(node.block_ids)):
            raise AssertionError("a node lacks a block of a group that keeps all")
    if any(count > 1 for count in owners.values()):
        raise AssertionError("a block is in the tree twice")
    known = list(sequences)
    for sequence in known:
        _check_sequence(sequence, cache)
        owners.update(sequence.blocks)
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


def _check_sequence(sequence: Sequence, cache: PrefixCache) -> None:
    size, pos = cache.block_size, sequence.cache_pos
    slots = min((len(table) * size for table in sequence.block_tables), default=len(sequence.token_ids))
    if not 0 <= pos <= min(slots, len(sequence.token_ids)):
        raise AssertionError(f"cache_pos {pos} exceeds {slots} slots or {len(sequence.token_ids)} ids")
    blocks = list(sequence.blocks)
    if len(set(blocks)) != len(blocks):
        raise AssertionError("a block stands twice in the block tables of one sequence")
    if sequence.blocks.held_point(pos) != pos:
        raise AssertionError("a block is missing that is needed to go on")
    if len(sequence.nodes) != (pos // size if cache.holds_kv else 0):
        raise AssertionError("the full blocks of a sequence are not all in the tree")
    for index, node in enumerate(sequence.nodes):
        if node.key != tuple(sequence.token_ids[index * size : (index + 1) * size]):
            raise AssertionError(f"block {index} of a sequence holds other ids than its history says")
        own = [table[index] for table in sequence.block_tables]
        if any(block_id not in (NULL_BLOCK, kept) for block_id, kept in zip(own, node.block_ids, strict=True)):
            raise AssertionError(f"block {index} of a sequence is not the tree's")
    parent = None
    for node in sequence.nodes:
        if node.parent is not parent:
            raise AssertionError("the nodes of a sequence are no path of the tree")
        parent = node
    _check_spare(sequence, cache)


def _check_spare(sequence: Sequence, cache: PrefixCache) -> None:
    for group, table in enumerate(sequence.block_tables):
        for index in range(len(table)):
            kept = cache.windows.keeps(group, index, sequence.cache_pos, sequence.blocks.anchors)
            if table[index] != NULL_BLOCK and not kept:
                raise AssertionError(f"block {index} of group {group} is held and of no more use")
