"""RMSNorm, SwiGLU and GeGLU in plain torch, with the signatures of their kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_out(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight over the last dimension; rounded to x's dtype before the product.

    x, out: [T, n] or [T, heads, n]; weight: [n]. The mean square is taken in float32.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(normed.to(x.dtype) * weight)


def add_rms_norm_out(residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += x, rounded to its dtype; out = RMSNorm of that. All [T, n] or [T, heads, n]; weight: [n]."""
    residual.add_(x)
    rms_norm_out(residual, weight, eps, out)


def swiglu_out(gate_up: Tensor, out: Tensor) -> None:
    """out [T, n] = silu(gate) * up of gate_up [T, 2 n]; float32 inside, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def geglu_out(gate_up: Tensor, out: Tensor) -> None:
    """As `swiglu_out` with the tanh form of gelu(gate)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)
