"""What a session's cache holds as a picture: norms of K and V, or how alike neighbours are, by layer and position."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.debugging.protocol import MapQuery
from engine.errors import Conflict, InvalidRequest
from engine.jobs import Slices
from engine.kv_cache.spec import KVCacheSpec
from engine.lane import Lane
from engine.loader import EngineParts
from engine.sampling.params import check_whole
from engine.sequence import Sequence

WHAT = ("k_norm", "v_norm", "k_similarity", "v_similarity")
MAX_COLUMNS = 256
SLICE_VALUES = 2**19
"""Cached values that are read in one slice: a few milliseconds."""


def check_query(query: MapQuery, spec: KVCacheSpec) -> None:
    """Raises `InvalidRequest`."""
    if not spec.num_layers:
        raise InvalidRequest("The model has no attention layers, so there are no keys and values to look at.")
    if query.what not in WHAT:
        raise InvalidRequest(f"what must be one of {', '.join(WHAT)}, not {query.what!r:.40}.")
    check_whole("columns", query.columns, 1, MAX_COLUMNS)
    if query.head is not None:
        check_whole("head", query.head, 0, spec.num_kv_heads - 1)


class CachedIds:
    """What is cached of a session while it is read in slices; turns may go on, but must not change what was there."""

    def __init__(self, loop: Lane, session_id: str) -> None:
        """Raises `Conflict` if nothing of the session is in the pool."""
        self._loop, self._session_id = loop, session_id
        sequence = loop.scheduler.find(session_id)
        if sequence is None or not sequence.cache_pos:
            raise Conflict(
                "Nothing of this chat is in the cache now; its next turn brings it back or computes it.",
                code="not_cached",
            )
        self.ids = tuple(sequence.token_ids[: sequence.cache_pos])

    def now(self) -> Sequence:
        """The sequence, ready to be read. Raises `Conflict` if what was cached at first is no longer."""
        sequence = self._loop.scheduler.find(self._session_id)
        kept = sequence is not None and sequence.cache_pos >= len(self.ids)
        if sequence is None or not kept or tuple(sequence.token_ids[: len(self.ids)]) != self.ids:
            raise Conflict("The chat was changed while its cache was read; look again.", code="changed")
        self._loop.runner.sync_blocks()
        return sequence


def cache_map(loop: Lane, parts: EngineParts, session_id: str, query: MapQuery) -> Slices[dict[str, Any]]:
    """The body of `GET /api/sessions/{id}/cache/map`. Changes nothing; turns go on meanwhile.

    Every cached position is looked at; a column is a stretch of positions, and its value in a layer is the one there
    that is farthest from the layer's median, or of similarities the greatest. Raises `Conflict`.
    """
    cached = CachedIds(loop, session_id)
    count, spec = len(cached.ids), parts.cache.spec
    step = max(SLICE_VALUES // (len(spec.places) * 2 * spec.num_kv_heads * spec.head_dim), 1)
    found = []
    for start in range(0, count, step):
        found.append(_measured(parts, cached.now(), query, start, min(step, count - start)))
        yield
    values = torch.cat(found, 1)
    held = _held(cached.now(), spec, count)
    yield
    return {"what": query.what, "head": query.head, "cache_pos": count, **drawn(values, held, query)}


def _measured(parts: EngineParts, sequence: Sequence, query: MapQuery, start: int, count: int) -> Tensor:
    """float32 [layers, count]; NaN where a row, or of similarities the one before, is not finite or not held."""
    similar = query.what.endswith("similarity")
    first = max(start - 1, 0) if similar else start
    rows = parts.cache.read_tokens(sequence.block_tables, first, start + count - first)
    rows = rows[0 if query.what.startswith("k") else 1]
    rows = (rows.flatten(2) if query.head is None else rows[:, :, query.head]).cpu()
    if not similar:
        return rows.norm(dim=-1)
    found = similarity(rows[:, :-1], rows[:, 1:])
    nothing = torch.full((len(rows), count - found.shape[1]), math.nan)
    return torch.cat((nothing, found), 1)


def similarity(one: Tensor, other: Tensor) -> Tensor:
    """Cosines [...] of rows [..., n]. Equal rows are 1, also where both are zero; a zero row beside another is 0."""
    norms = one.norm(dim=-1) * other.norm(dim=-1)
    cosine = (one * other).sum(-1) / norms.clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where((one == other).all(-1), 1.0, cosine.clamp(-1, 1))


def _held(sequence: Sequence, spec: KVCacheSpec, count: int) -> Tensor:
    """bool [layers, count]: windows give up what they have passed."""
    size = spec.block_size
    groups = [
        torch.tensor([sequence.blocks.holds(group, index) for index in range(-(-count // size))])
        for group in range(len(spec.groups))
    ]
    return torch.stack([groups[place.group].repeat_interleave(size)[:count] for place in spec.places])


def drawn(values: Tensor, held: Tensor, query: MapQuery) -> dict[str, Any]:
    """`{columns, values, positions, medians, bad}` of values and held [layers, n].

    A value is None where the stretch has none; `bad` are [layer, column] of what is not finite.
    """
    held = held.clone()
    if query.what.endswith("similarity"):
        held[:, 1:] &= held[:, :-1].clone()
        held[:, :1] = False
    medians = _medians(values, held)
    count = values.shape[1]
    width = -(-count // query.columns)
    picked = _picked(values, held, medians, query.what, width)
    shown = values.gather(1, picked.clamp_min(0))
    finite = shown.isfinite() & (picked >= 0)
    return {
        "columns": [[first, min(first + width, count) - 1] for first in range(0, count, width)],
        "values": [_rounded(row, kept) for row, kept in zip(shown, finite, strict=True)],
        "positions": [[None if at < 0 else at for at in row] for row in picked.tolist()],
        "medians": _rounded(medians, medians.isfinite()),
        "bad": ((picked >= 0) & ~finite).nonzero().tolist(),
    }


def _medians(values: Tensor, held: Tensor) -> Tensor:
    """float32 [layers] of what is held and finite; NaN where there is nothing."""
    return torch.where(held & values.isfinite(), values, math.nan).nanmedian(-1).values


def _picked(values: Tensor, held: Tensor, medians: Tensor, what: str, width: int) -> Tensor:
    """int64 [layers, columns]: which position stands for each stretch of `width`, what is not finite before all others;
    -1 where none is held."""
    strange = values if what.endswith("similarity") else (values - medians.nan_to_num()[:, None]).abs()
    strange = strange.nan_to_num(math.inf, math.inf).masked_fill(~held, -math.inf)
    strange = F.pad(strange, (0, -values.shape[1] % width), value=-math.inf).unflatten(1, (-1, width))
    best, offset = strange.max(-1)
    starts = torch.arange(0, values.shape[1], width)
    return torch.where(best == -math.inf, -1, starts + offset)


def _rounded(values: Tensor, finite: Tensor) -> list[float | None]:
    """To five figures; None where a value is not finite."""
    pairs = zip(values.tolist(), finite.tolist(), strict=True)
    return [float(f"{value:.5g}") if sound else None for value, sound in pairs]
