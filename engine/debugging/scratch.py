"""Runs a session's ids again beside it: what its K, V, state and logits should be, and how much rounding may do."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import build_metadata
from engine.debugging.rows import StoredRows, put_rows, read_rows
from engine.jobs import Slices
from engine.kv_cache.block_pool import OutOfBlocks
from engine.lane import Lane
from engine.loader import EngineParts
from engine.replay import Replay
from engine.scheduler import ScheduledBatch, ScheduledItem
from engine.sequence import Sequence

DECODED = 16
"""Last tokens that the second prefill runs one by one, as replies are made."""
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """K and V of all positions (None without attention layers), the recurrent state behind them (None without such
    layers) and float32 logits [V] after one token more, None where they weren't wanted."""

    rows: StoredRows | None
    state: State | None
    logits: Tensor | None


def computed(
    parts: EngineParts, ids: SequenceOf[int], chunk: int, following: int | None = None, decoded: int = 0
) -> Slices[Run]:
    """Run ids on a cache like the live one, `chunk` tokens a step and the last `decoded` one by one."""
    replay = Replay(parts.model, parts.cache.spec, len(ids) + 1, parts.cache.balance, keep_all=True)
    split = max(len(ids) - decoded, 0)
    for part, step in ((ids[:split], chunk), (ids[split:], 1)):
        if part:
            yield from replay.slices(part, 1, step)
            yield
    rows = read_rows(replay.cache, replay.sequence, len(ids)) if parts.cache.spec.num_layers else None
    state = replay.state()
    logits = None
    if following is not None:
        logits = (yield from replay.slices([following], 1, 1))[-1].cpu()
    return Run(rows, state, logits)


def continued(parts: EngineParts, ids: SequenceOf[int], rows: StoredRows, start: int) -> Slices[StoredRows]:
    """K and V as the model makes them of `ids` from `start` on if it goes on from stored rows. Needs attention only."""
    replay = Replay(parts.model, parts.cache.spec, len(ids) + 1, parts.cache.balance, keep_all=True)
    replay.sequence.set_tokens(ids[:start])
    replay.sequence.reserve(start)
    if start:
        put_rows(replay.cache, replay.sequence, rows.first(start))
        replay.sequence.advance(start)
    yield from replay.slices(ids[start:], 1, parts.limits.mixed_batch_tokens)
    return read_rows(replay.cache, replay.sequence, len(ids))


def live(loop: Lane, parts: EngineParts, sequence: Sequence, following: int) -> Run:
    """What is stored of an idle session now; its logits where there is a free block, and slot, to run one token in."""
    loop.runner.sync_blocks()
    count = sequence.cache_pos
    rows = read_rows(parts.cache, sequence, count) if parts.cache.spec.num_layers else None
    return Run(rows, _live_state(parts, sequence), _live_logits(loop, parts, sequence, following))


def _live_state(parts: EngineParts, sequence: Sequence) -> State | None:
    if sequence.state is None or sequence.state.held is None or parts.states is None:
        return None
    return parts.states.export_state(sequence.state.held.slot)


def _live_logits(loop: Lane, parts: EngineParts, sequence: Sequence, following: int) -> Tensor | None:
    logits = logits_behind(loop, parts, sequence, (following,), sequence.cache_pos)
    return None if logits is None else logits[-1].cpu()


def logits_behind(
    loop: Lane, parts: EngineParts, sequence: Sequence, token_ids: SequenceOf[int], start: int
) -> Tensor | None:
    """float32 logits [n, V] after each of `token_ids`, run behind the first `start` cached tokens of a session.

    On a fork, so that the session keeps its blocks and its state as they are. None where there are no free blocks, or
    slot, for that, since nobody loses a block for it, and where the sequence can't go on from just there.
    """
    pool, checkpoints, spec = loop.prefix_cache.pool, loop.prefix_cache.checkpoints, parts.cache.spec
    needed = (-(-len(token_ids) // spec.block_size) + 1) * len(spec.groups)
    if loop.prefix_cache.holds_kv and pool.free_count < needed:
        return None
    if checkpoints is not None and not checkpoints.slots.free_count:
        return None
    twin = sequence.fork(None, start)
    try:
        if twin.cache_pos < start:
            return None
        twin.set_tokens([*sequence.token_ids[:start], *token_ids])
        twin.reserve(len(twin.token_ids))
        loop.runner.sync_blocks()
        batch = ScheduledBatch((ScheduledItem(twin, start, len(token_ids), True),))
        ids, meta = build_metadata(batch, spec.block_size, parts.model.device)
        return parts.model.head(parts.model.hidden_states(ids, parts.cache, meta, parts.states))
    except OutOfBlocks:
        return None
    finally:
        twin.release_blocks()


def relative(value: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of what is right; NaN where a value is not finite."""
    return float((value.float() - right.float()).norm() / torch.clamp(right.float().norm(), min=1e-12))
