"""How well a model bears its KV cache in few bits: measured on a short text when such a cache is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.jobs import Slices, run_through
from engine.kv_cache.cache import KVCache
from engine.kv_cache.spec import KVCacheSpec
from engine.models.registry import DecoderModel
from engine.replay import REPLAY_CHUNK, Replay
from kernels.kv_format import FP32

CALIBRATION_TOKENS = 128
CALIBRATION_TEXT = """The lighthouse keeper wrote down the weather each evening: wind from the north-west, 17 knots,
rain after nine. "Why do you bother?" asked his sister. "Because nobody else will remember it," he said, and went on.
def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
Zwei Boote kamen zurück, das dritte nicht. 1, 2, 3, 5, 8, 13; (a + b)**2 = a**2 + 2*a*b + b**2.
| month | days | | --- | --- | | March | 31 | | April | 30 |"""
EVENNESS = (0.0, 0.5, 1.0)
KL_LIMITS = {"int8": 0.02, "fp8": 0.05, "int4": 0.3}
"""Largest mean KL divergence, in nats, that passes without a warning."""


@dataclass(frozen=True, slots=True)
class PrecisionLoss:
    """Of the next-token distributions with a cache in few bits against those with a float32 one."""

    mean_kl: float
    max_kl: float
    top1_agreement: float


def precision_loss(exact: Tensor, logits: Tensor) -> PrecisionLoss:
    """KL(exact || logits) and agreement over rows float32 [n, V]."""
    p, q = exact.double().log_softmax(-1), logits.double().log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    same = (exact.argmax(-1) == logits.argmax(-1)).double().mean()
    return PrecisionLoss(float(divergence.mean()), float(divergence.max()), float(same))


def balance_constants(keys: Tensor, values: Tensor, evenness: float) -> Tensor:
    """float32 [num_layers, num_kv_heads, head_dim] that make each head's largest |K| as large as its largest |V|.

    keys, values: [num_layers, tokens, num_kv_heads, head_dim]. evenness 0: one constant per head. 1: one per pair of
    channels that RoPE turns into each other, so that all pairs become equally large; what lies between is a power of
    it, as SmoothQuant does with activations. Dividing K and multiplying Q by it changes no score.
    """
    first, second = keys.abs().amax(1).chunk(2, -1)
    pairs = torch.maximum(first, second).repeat(1, 1, 2).clamp_min(1e-6)
    shape = pairs**evenness
    largest = (pairs / shape).amax(-1, keepdim=True) / values.abs().amax((1, 3))[..., None].clamp_min(1e-6)
    return (shape * largest).contiguous()


@torch.inference_mode()
def calibrate(model: DecoderModel, cache: KVCache, token_ids: Sequence[int]) -> PrecisionLoss:
    """Run a text with a float32 cache and with one like `cache`, an empty one; tells what the latter costs.

    Formats with scales get their balance constants first, the ones that cost least on this text: some models have few
    channels of K that are much larger than all others, and make those coarse that share their scale.
    """
    return run_through(calibration_slices(model, cache, token_ids, REPLAY_CHUNK))


def calibration_slices(
    model: DecoderModel, cache: KVCache, token_ids: Sequence[int], chunk: int
) -> Slices[PrecisionLoss]:
    """As `calibrate`, pausing after each `chunk` tokens."""
    count = len(token_ids)
    exact = Replay(model, replace(cache.spec, format=FP32), count, keep_all=True)
    expected = yield from exact.slices(token_ids, count, chunk)
    candidates: list[Tensor | None] = [None]
    if cache.spec.format.has_scales:
        keys, values = exact.cache.read_tokens(exact.sequence.block_tables, 0, count)
        candidates = [balance_constants(keys, values, evenness) for evenness in EVENNESS]
    losses: list[PrecisionLoss] = []
    for balance in candidates:
        yield
        logits = yield from Replay(model, cache.spec, count, balance).slices(token_ids, count, chunk)
        losses.append(precision_loss(expected, logits))
    best = min(range(len(losses)), key=lambda i: losses[i].mean_kl)
    cache.balance = candidates[best]
    return losses[best]


@torch.inference_mode()
def layout_loss(model: DecoderModel, apart: KVCacheSpec, spec: KVCacheSpec, token_ids: Sequence[int]) -> PrecisionLoss:
    """What a text loses with layers placed as in `spec` against `apart`, both in float32."""
    count = len(token_ids)
    expected, logits = (
        Replay(model, replace(one, format=FP32), count).extend(token_ids, count) for one in (apart, spec)
    )
    return precision_loss(expected, logits)
