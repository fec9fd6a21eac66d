"""One cached row beside what it was before it was rounded to the cache's format."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.debugging.maps import CachedIds
from engine.debugging.protocol import ValueQuery
from engine.debugging.replays import check_room
from engine.debugging.rows import is_held
from engine.errors import Conflict, InvalidRequest
from engine.jobs import Slices
from engine.kv_cache.spec import KVCacheSpec
from engine.lane import Lane
from engine.loader import EngineParts
from engine.replay import Replay
from engine.sampling.params import check_whole
from engine.sequence import Sequence
from kernels.kv_format import FP32

STORED, IDS = "stored", "ids"
COPIED = 2**21
"""Cached values that are copied in one slice."""
SENTENCES = {
    STORED: "Exact values: this token run again, in float32, on what is stored of the tokens before it.",
    IDS: "Exact values: all tokens up to this one run again with a float32 cache, because what this one was computed "
    "from is not all kept.",
}


def check_query(query: ValueQuery, spec: KVCacheSpec) -> None:
    """Raises `InvalidRequest`."""
    if not spec.num_layers:
        raise InvalidRequest("The model has no attention layers, so there are no keys and values to look at.")
    if query.tensor not in ("k", "v"):
        raise InvalidRequest('tensor must be "k" or "v".')
    check_whole("layer", query.layer, 0, len(spec.places) - 1)
    check_whole("head", query.head, 0, spec.num_kv_heads - 1)
    check_whole("position", query.position, 0, 2**31 - 1)


def stored_and_exact(loop: Lane, parts: EngineParts, session_id: str, query: ValueQuery) -> Slices[dict[str, Any]]:
    """The body of `GET /api/sessions/{id}/cache/values`. Changes nothing; turns go on meanwhile.

    Raises `Conflict` if the row is not in the cache, and `InvalidRequest` if the KV budget has no room for a float32
    copy of what stands before it.
    """
    cached = CachedIds(loop, session_id)
    sequence, place = cached.now(), (query.layer, query.position)
    if query.position >= len(cached.ids) or not is_held(parts.cache, sequence, *place):
        raise Conflict(
            f"Layer {query.layer} does not hold position {query.position} now: {len(cached.ids)} tokens are cached, "
            "and a layer with a window gives up what it has passed.",
            code="not_cached",
        )
    tables = sequence.block_tables
    stored = parts.cache.read(tables, query.layer, query.head, query.tensor, query.position, 1)[0]
    check_room(parts, query.position + 1)
    source = STORED if _can_go_on(parts, sequence, query.position) else IDS
    exact = yield from _exact(parts, cached, query, source)
    return _report(parts, cached.ids[query.position], query, stored, exact, source)


def _can_go_on(parts: EngineParts, sequence: Sequence, position: int) -> bool:
    """Whether all that the position was computed from is held; a recurrent state of then is not."""
    size, windows = parts.cache.spec.block_size, parts.cache.spec.windows
    return parts.states is None and all(
        sequence.blocks.holds(group, index) or not windows.needs(group, index, position)
        for group in range(len(windows.groups))
        for index in range(-(-position // size))
    )


def _exact(parts: EngineParts, cached: CachedIds, query: ValueQuery, source: str) -> Slices[Tensor]:
    """float32 [head_dim] of the row before rounding."""
    spec = replace(parts.cache.spec, format=FP32)
    count = query.position + 1
    replay = Replay(parts.model, spec, count, keep_all=True)
    yield
    if source == STORED and query.position:
        yield from _copy(parts, cached, replay, query.position)
    ids = cached.ids[replay.sequence.cache_pos : count]
    yield from replay.slices(ids, 1, parts.limits.mixed_batch_tokens)
    tables = replay.sequence.block_tables
    return replay.cache.read(tables, query.layer, query.head, query.tensor, query.position, 1)[0]


def _copy(parts: EngineParts, cached: CachedIds, replay: Replay, count: int) -> Slices[None]:
    """The first `count` tokens of the session as attention reads them, into the replay's float32 cache."""
    spec, target = parts.cache.spec, replay.sequence
    target.set_tokens(cached.ids[:count])
    target.reserve(count)
    size = spec.block_size
    step = max(COPIED // (len(spec.places) * 2 * spec.num_kv_heads * spec.head_dim * size), 1) * size
    for start in range(0, count, step):
        read = min(step, count - start)
        rows = parts.cache.read_tokens(cached.now().block_tables, start, read)
        for layer, place in enumerate(spec.places):
            for first in range(0, read, size):
                block = target.block_tables[place.group][(start + first) // size]
                part = rows[:, layer, first : first + size]
                extent, row = divmod(block, replay.cache.blocks_per_extent)
                replay.cache.extents[extent][row, place.store, :, : part.shape[1]].copy_(part)
        yield
    target.advance(count)


def _report(
    parts: EngineParts, token_id: int, query: ValueQuery, stored: Tensor, exact: Tensor, source: str
) -> dict[str, Any]:
    difference = (stored - exact).abs()
    size = float(exact.norm())
    return {
        "tensor": query.tensor,
        "layer": query.layer,
        "head": query.head,
        "position": query.position,
        "token_id": token_id,
        "token": parts.tokenizer.token_text(token_id),
        "kv_format": parts.kv_format,
        "stored": _shown(stored),
        "exact": _shown(exact),
        "max_error": _finite(float(difference.max())),
        "relative_error": _finite(float(difference.norm()) / size) if size else None,
        "source": source,
        "sentence": SENTENCES[source],
    }


def _shown(values: Tensor) -> list[float | None]:
    return [_finite(value) for value in values.tolist()]


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
