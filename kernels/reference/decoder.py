"""Norms, activation, rotary embedding and products in plain torch: the definitions that kernels are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] / rms(x) * weight [n]; the mean square is taken in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 n] -> silu(gate) * up [T, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def geglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 n] -> gelu(gate) * up [T, n], with the tanh form of gelu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [T, n, D] in place. cos, sin: [T, 1, D], the first half of sin negated (see `rotary_tables`)."""
    turned = torch.roll(heads, heads.shape[-1] // 2, dims=-1)
    torch.addcmul(heads * cos, turned, sin, out=heads)


def rotary_tables(positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sign-folded sin [T, 1, D] for int64 positions [T] and float32 inv_freq [D / 2]."""
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] @ weight [out, in]ᵀ + bias, computed in the weight's dtype, returned in x's."""
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)
