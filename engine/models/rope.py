"""Frequencies of the rotary embedding, with the ways in which models stretch them to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int, divisors: Tensor | None = None) -> tuple[Tensor, float]:
    """`(inv_freq float32 [head_dim / 2], factor for cos and sin)`. `divisors` [head_dim / 2] come from the file."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.base**exponents)
    if divisors is not None:
        return inv_freq / divisors, 1.0
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, exponents), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > rope.original_context / low, inv_freq / rope.factor, inv_freq)
    smooth = (rope.original_context / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = (wavelength >= rope.original_context / high) & (wavelength <= rope.original_context / low)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, head_dim: int, exponents: Tensor) -> Tensor:
    """Dimensions that turn often within the trained context are kept, slow ones stretched, with a ramp between."""

    def turning_dim(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.base))

    low, high = turning_dim(rope.beta_fast), turning_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    frequencies = rope.base**exponents
    return (1.0 / (rope.factor * frequencies)) * (1 - keep) + (1.0 / frequencies) * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
