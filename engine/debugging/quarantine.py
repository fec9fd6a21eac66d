"""Keeps a session's wrong blocks to itself: no other session may take them over, and repair cuts them off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.errors import Conflict
from engine.kv_cache.block_pool import NULL_BLOCK, OutOfBlocks
from engine.lane import Lane
from engine.sequence import Sequence, Status


def own_blocks(loop: Lane, sequence: Sequence, positions: Iterable[int]) -> int:
    """Make these positions the sequence's own to write: copies of shared blocks, out of the tree from the first on.

    The number of copies. Raises `OutOfBlocks` before anything is changed. What the tree had stays in it.
    """
    size, pool = sequence.block_size, loop.prefix_cache.pool
    wanted = {position // size for position in positions}
    shared = [
        (table, index)
        for table in sequence.block_tables
        for index in sorted(wanted)
        if table[index] != NULL_BLOCK and pool.ref_count(table[index]) > 1
    ]
    fresh: list[int] = []
    try:
        for _ in shared:
            fresh.append(loop.prefix_cache.allocate())
    except OutOfBlocks:
        for block_id in fresh:
            pool.release(block_id)
        raise
    for (table, index), block_id in zip(shared, fresh, strict=True):
        pool.pending_copies.append((table[index], block_id))
        pool.release(table[index])
        table[index] = block_id
    sequence.keep_private(min(wanted) * size)
    loop.runner.sync_blocks()
    return len(shared)


@dataclass(frozen=True, slots=True)
class Cut:
    """What repair has to run again: `prompt_ids` (empty: nothing), and the token that was pending behind them."""

    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...] | None
    report: dict[str, Any]


def repair_cut(loop: Lane, session_id: str, found: dict[str, Any]) -> Cut:
    """Cut an idle session's cache before the first wrong position that an audit found. Raises `Conflict`."""
    sequence = loop.scheduler.find(session_id)
    if sequence is not None and sequence.status is not Status.IDLE:
        raise Conflict("This session is still answering; wait for the reply or stop it first.")
    first = min((fault["first_position"] for fault in found["faults"]), default=None)
    if sequence is None or first is None or first >= sequence.cache_pos:
        sentence = "There is nothing to repair: no wrong position is in the cache."
        return Cut((), None, {"cut_tokens": 0, "recomputed_tokens": 0, "first_position": None, "sentence": sentence})
    ids, before = list(sequence.token_ids), sequence.cache_pos
    pending = (ids[before],) if len(ids) > before else None
    cut(loop, sequence, first)
    loop.records.changed(session_id)
    lost = before - sequence.cache_pos
    sentence = f"The cache was cut at position {sequence.cache_pos}; {lost} tokens behind it are computed again."
    report = {"cut_tokens": lost, "recomputed_tokens": lost, "first_position": first, "sentence": sentence}
    return Cut(tuple(ids[:before]), pending, report)


def cut(loop: Lane, sequence: Sequence, position: int) -> None:
    """Cut an idle sequence's cache before a wrong position, and expel from tree and kept states what follows it.

    Other sessions that share such blocks keep them to themselves.
    """
    size, checkpoints = sequence.block_size, loop.prefix_cache.checkpoints
    index = position // size
    if checkpoints is not None:
        for kept in list(checkpoints.along(sequence.token_ids, sequence.cache_pos)):
            if kept.position > position:
                checkpoints.remove(kept)
    if index < sequence.tree_blocks:
        wrong = sequence.nodes[index]
        loop.prefix_cache.expel(wrong)
        for other in loop.scheduler.sequences():
            if index < other.tree_blocks and other.nodes[index] is wrong:
                other.keep_private(index * size)
    sequence.truncate(position)
    sequence.set_tokens(sequence.token_ids[: sequence.cache_pos + 1])
