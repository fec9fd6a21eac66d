"""What a session's cache costs in precision: its ids run again, once in float32 and once in the format in question."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.debugging.protocol import PrecisionQuery
from engine.errors import InvalidRequest, NonFiniteValues
from engine.jobs import Slices
from engine.kv_cache.cache import KVCache
from engine.kv_cache.calibration import (
    CALIBRATION_TEXT,
    CALIBRATION_TOKENS,
    PrecisionLoss,
    calibration_slices,
    precision_loss,
)
from engine.kv_cache.prefixes import common_prefix_len
from engine.kv_cache.spec import KVCacheSpec
from engine.loader import EngineParts
from engine.replay import Replay, scratch_blocks
from engine.sampling.params import check_whole
from kernels.kv_format import FP32, KV_FORMATS

GREEDY_TOKENS = 32
MAX_COUNT = 256
ROWS = 16
"""Rows of logits that are compared in one slice."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Run:
    """float32 [count, V] logits of the last ids, and the likeliest text after them."""

    logits: Tensor
    greedy: tuple[int, ...]


def check_query(query: PrecisionQuery) -> None:
    check_whole("count", query.count, 1, MAX_COUNT)
    if query.kv_format is not None and query.kv_format not in KV_FORMATS:
        raise InvalidRequest(f"kv_format must be one of {', '.join(KV_FORMATS)}, not {query.kv_format!r:.40}.")
    if not query.token_ids:
        raise InvalidRequest("There is nothing in this session to compare yet.")


def scratch_bytes(parts: EngineParts, query: PrecisionQuery) -> int:
    """The most that is held at one time: a float32 cache of all ids, and both runs' logits."""
    spec = replace(parts.cache.spec, format=FP32)
    return (
        scratch_blocks(spec, len(query.token_ids) + GREEDY_TOKENS) * spec.block_bytes
        + 2 * 4 * query.count * parts.vocab_size
    )


def check_scratch(parts: EngineParts, needed: int) -> None:
    """Raises `InvalidRequest` if `needed` bytes would not fit into what the KV budget has left."""
    left = max(parts.max_blocks * parts.cache.spec.block_bytes - parts.cache.reserved_bytes, 0)
    if needed > left:
        raise InvalidRequest(
            f"This needs {-(-needed // MIB)} MiB of scratch memory, and the KV budget has {left // MIB} MiB left; "
            "raise --kv-budget."
        )


def compare_precision(parts: EngineParts, query: PrecisionQuery) -> Slices[dict[str, Any]]:
    """The body of `POST /api/sessions/{id}/compare`. Touches no session: both runs have a cache of their own.

    Raises `InvalidRequest` if these would not fit into what the KV budget has left.
    """
    began = time.perf_counter()
    kv_format = query.kv_format or parts.kv_format
    spec = replace(parts.cache.spec, format=KV_FORMATS[kv_format])
    if not spec.num_layers:
        raise InvalidRequest("This model keeps no keys and values, so there is no precision to compare.")
    check_scratch(parts, scratch_bytes(parts, query))
    # One after the other, in equal slices: the same format on both sides gives the same numbers.
    exact = yield from _run(parts, query, replace(spec, format=FP32), None)
    balance = yield from balance_of(parts, spec)
    other = yield from _run(parts, query, spec, balance)
    loss = yield from _loss(exact.logits, other.logits)
    equal = common_prefix_len(exact.greedy, other.greedy)
    return {
        "kv_format": kv_format,
        "reference": "fp32",
        "tokens": len(exact.logits),
        "mean_kl": loss.mean_kl,
        "max_kl": loss.max_kl,
        "top1_agreement": loss.top1_agreement,
        "parts_at": None if equal == len(exact.greedy) else equal,
        "greedy_tokens": len(exact.greedy),
        "ms": round(1e3 * (time.perf_counter() - began), 1),
    }


def _run(parts: EngineParts, query: PrecisionQuery, spec: KVCacheSpec, balance: Tensor | None) -> Slices[_Run]:
    ids, chunk = query.token_ids, parts.limits.mixed_batch_tokens
    replay = Replay(parts.model, spec, len(ids) + GREEDY_TOKENS, balance)
    yield
    logits = yield from replay.slices(ids, min(query.count, len(ids)), chunk)
    greedy = [int(logits[-1].argmax())]
    # The text's last token is not run, so it may lie one past the context.
    for _ in range(min(GREEDY_TOKENS - 1, parts.max_seq_len - len(ids))):
        yield
        last = yield from replay.slices(greedy[-1:], 1, chunk)
        greedy.append(int(last[-1].argmax()))
    return _Run(logits, tuple(greedy))


def balance_of(parts: EngineParts, spec: KVCacheSpec) -> Slices[Tensor | None]:
    """The balance constants that a cache of this format has with this model."""
    if spec.format == parts.cache.spec.format:
        return parts.cache.balance
    if not spec.format.has_scales:
        return None
    ids: Sequence[int] = parts.tokenizer.encode(CALIBRATION_TEXT)
    cache = KVCache(spec, parts.model.device)
    most = min(CALIBRATION_TOKENS, parts.max_seq_len)
    yield from calibration_slices(parts.model, cache, ids[:most], parts.limits.mixed_batch_tokens)
    return cache.balance


def _loss(exact: Tensor, other: Tensor) -> Slices[PrecisionLoss]:
    """`precision_loss` of all rows, a few at a time."""
    if not bool(torch.isfinite(other).all()) or not bool(torch.isfinite(exact).all()):
        raise NonFiniteValues("The model produced values that are not finite.")
    total = len(exact)
    mean = top1 = largest = 0.0
    for start in range(0, total, ROWS):
        yield
        rows = slice(start, start + ROWS)
        loss, share = precision_loss(exact[rows], other[rows]), len(exact[rows]) / total
        mean += share * loss.mean_kl
        top1 += share * loss.top1_agreement
        largest = max(largest, loss.max_kl)
    return PrecisionLoss(mean, largest, top1)
