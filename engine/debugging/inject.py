"""Damages one session's cache on purpose, to train people and to test what finds faults. Never another session's."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from engine.debugging.faults import KINDS, rotate
from engine.debugging.protocol import FaultRequest
from engine.debugging.quarantine import own_blocks
from engine.debugging.rows import StoredRows, is_held, read_rows, write_rows
from engine.debugging.scratch import computed
from engine.errors import Conflict, InvalidRequest
from engine.jobs import Slices
from engine.kv_cache.block_pool import OutOfBlocks
from engine.lane import Lane
from engine.loader import EngineParts
from engine.sequence import Sequence, Status

DEFAULT_AMOUNT = {"shift": 1.0, "wrong_position": 1.0, "scale": 2.0, "overwrite": 1.0}
MOST_FACTOR = 64.0


def inject(loop: Lane, parts: EngineParts, request: FaultRequest) -> Slices[dict[str, Any]]:
    """Do the damage; `{session_id, kind, layers, start, count, amount, blocks_copied}`.

    What each kind does to rows `start : start + count`, with `amount` where it means something:
    shift: they get the rows of `amount` positions before them; overwrite: random rows of the same size; stale: rows of
    ids that stood there before an edit, or, where there was none, of the session's own ids in reverse order, which then
    count as such; wrong_position: keys rotated for `amount` positions further; swap_blocks: the whole blocks of the
    first and the last of them (if these are one, it and the next) change places; scale: K and V times `amount`; nan.

    Blocks that others use, or could take over, are copied first, and the session's blocks leave the tree from there on.
    Raises `InvalidRequest` and `Conflict`; then nothing was changed.
    """
    sequence = _checked_sequence(loop, parts, request)
    ids = tuple(sequence.token_ids[: sequence.cache_pos])
    layers = range(len(parts.cache.spec.places)) if request.layer is None else (request.layer,)
    amount = DEFAULT_AMOUNT.get(request.kind, 0.0) if request.amount is None else request.amount
    positions = list(range(request.start, request.start + request.count))
    if request.kind == "swap_blocks":
        positions = _two_blocks(sequence, request)
    old = None
    if request.kind == "stale":
        old, version = yield from _old_rows(loop, parts, request, ids)
        positions = [p for p in positions if p < old.count]
    sequence = _checked_sequence(loop, parts, request)
    if tuple(sequence.token_ids[: sequence.cache_pos]) != ids:
        raise Conflict("The session's cache changed in the meantime; try again.")
    if not all(is_held(parts.cache, sequence, layer, p) for layer in layers for p in positions):
        raise InvalidRequest("A window has passed some of these positions, so they are no longer in the cache.")
    loop.keeper.save(request.session_id)
    try:
        copied = own_blocks(loop, sequence, positions)
    except OutOfBlocks:
        raise Conflict("The cache has no free block for a copy; try again when less is cached.") from None
    _write(parts, sequence, request.kind, amount, layers, positions, old)
    loop.records.changed(request.session_id)
    if old is not None and version not in loop.records.find(request.session_id).earlier:
        loop.records.find(request.session_id).earlier.appendleft(version)
    return {"session_id": request.session_id, "kind": request.kind, "layers": list(layers), "start": positions[0],
            "count": len(positions), "amount": amount, "blocks_copied": copied}  # fmt: skip


def _write(
    parts: EngineParts,
    sequence: Sequence,
    kind: str,
    amount: float,
    layers: SequenceOf[int],
    positions: list[int],
    old: StoredRows | None,
) -> None:
    rows = read_rows(parts.cache, sequence, sequence.cache_pos)
    for layer in layers:
        inv_freq = parts.model.inv_freq(layer).cpu()
        damaged = _damaged(kind, amount, rows.layer(layer), positions, old.layer(layer) if old else None, inv_freq)
        write_rows(parts.cache, sequence, layer, positions, damaged.to(parts.model.device))


def _damaged(
    kind: str, amount: float, rows: Tensor, positions: list[int], old: Tensor | None, inv_freq: Tensor
) -> Tensor:
    """The rows [2, len(positions), heads, head_dim] to be stored in place of these positions of `rows`."""
    here = torch.tensor(positions)
    own = rows[:, here]
    if kind == "shift":
        return rows[:, (here - int(amount)) % rows.shape[1]]
    if kind == "swap_blocks":
        return rows[:, here.roll(len(here) // 2)]
    if kind == "overwrite":
        return amount * torch.randn_like(own) * own.square().mean((1, 3), keepdim=True).sqrt()
    if kind == "wrong_position":
        return torch.stack((rotate(own[0], inv_freq, int(amount)), own[1]))
    if kind == "scale":
        return own * amount
    if kind == "stale":
        assert old is not None
        return old[:, here]
    return torch.full_like(own, math.nan)


def _old_rows(
    loop: Lane, parts: EngineParts, request: FaultRequest, ids: tuple[int, ...]
) -> Slices[tuple[StoredRows, tuple[int, ...]]]:
    """K and V of an earlier history that differs somewhere in the range, and that history."""
    start, end = request.start, request.start + request.count
    for version in loop.records.earlier(request.session_id, ids):
        if start < len(version) and version[start:end] != ids[start : min(end, len(version))]:
            break
    else:
        version = (*ids[:start], *ids[start:][::-1])
        if version[start:end] == ids[start:end]:
            version = (*ids[:start], *((token + 1) % parts.vocab_size for token in ids[start:]))
    rows = (yield from computed(parts, version[:end], parts.limits.mixed_batch_tokens)).rows
    assert rows is not None
    return rows, version


def _two_blocks(sequence: Sequence, request: FaultRequest) -> list[int]:
    """The positions of two whole blocks, one after the other. Raises `InvalidRequest` if there are not two."""
    size, full = sequence.block_size, sequence.cache_pos // sequence.block_size
    first, last = request.start // size, (request.start + request.count - 1) // size
    last = min(max(last, first + 1), full - 1)
    first = min(first, last - 1)
    if full < 2:
        raise InvalidRequest(f"swap_blocks needs two full blocks of {size} tokens; {sequence.cache_pos} are cached.")
    return [*range(first * size, (first + 1) * size), *range(last * size, (last + 1) * size)]


def _checked_sequence(loop: Lane, parts: EngineParts, request: FaultRequest) -> Sequence:
    spec = parts.cache.spec
    if request.kind not in KINDS:
        raise InvalidRequest(f"kind must be one of {', '.join(KINDS)}.")
    if not spec.num_layers:
        raise InvalidRequest("The model has no attention layers, so there are no keys and values to damage.")
    if request.layer is not None and not 0 <= request.layer < len(spec.places):
        raise InvalidRequest(f"layer must lie between 0 and {len(spec.places) - 1}, or be null for all.")
    _check_amount(request)
    sequence = loop.scheduler.find(request.session_id)
    if sequence is None or not sequence.cache_pos:
        raise InvalidRequest("Nothing of this session is in the cache.")
    if sequence.status is not Status.IDLE:
        raise Conflict("This session is still answering; wait for the reply or stop it first.")
    if request.start < 0 or request.count < 1 or request.start + request.count > sequence.cache_pos:
        raise InvalidRequest(f"start and count must name some of the {sequence.cache_pos} positions that are cached.")
    if request.kind in ("shift", "wrong_position") and abs(request.amount or 1) >= sequence.cache_pos:
        raise InvalidRequest(f"amount must be less than the {sequence.cache_pos} positions that are cached.")
    return sequence


def _check_amount(request: FaultRequest) -> None:
    amount = request.amount
    if amount is None:
        return
    if not math.isfinite(amount):
        raise InvalidRequest("amount must be a number.")
    if request.kind in ("shift", "wrong_position") and (amount == 0 or amount != int(amount)):
        raise InvalidRequest("amount must be a whole number of positions other than 0.")
    if request.kind in ("scale", "overwrite") and not 0 < amount <= MOST_FACTOR:
        raise InvalidRequest(f"amount must be a factor above 0 and up to {MOST_FACTOR:g}.")
    if request.kind == "scale" and amount == 1:
        raise InvalidRequest("amount must be another factor than 1.")
