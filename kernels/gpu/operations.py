"""The kernels with the signatures of `kernels.dispatch.Operations`, for layers that are run operation by operation."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu import rms_norm as norm
from kernels.gpu import swiglu as gates
from kernels.gpu.causal_conv import causal_conv
from kernels.gpu.copy_blocks import copy_blocks
from kernels.gpu.paged_attention import attention, plan_attention, store_kv
from kernels.gpu.ssm_chunk import ssm_chunk
from kernels.gpu.ssm_step import ssm_step

__all__ = [
    "attention",
    "causal_conv",
    "copy_blocks",
    "geglu",
    "plan_attention",
    "rms_norm",
    "ssm_chunk",
    "ssm_step",
    "store_kv",
    "swiglu",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, n] or [T, heads, n], of any strides; weight [n]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm.rms_norm(x if x.stride(-1) == 1 else x.contiguous(), weight, eps, out)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 n] -> [T, n]."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    gates.swiglu(gate_up.contiguous(), out)
    return out


def geglu(gate_up: Tensor) -> Tensor:
    """As `swiglu`, with the tanh form of GELU."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    gates.geglu(gate_up.contiguous(), out)
    return out
