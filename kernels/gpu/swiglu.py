"""SwiGLU, and the same with GELU, of a fused gate and up projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tuning import capability, launch_params
from kernels.reference.normalization import geglu_out, swiglu_out
from kernels.registry import register


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """silu(gate) * up in float32, or with GELU's tanh form, which is a sigmoid of a cubic."""
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate * tl.sigmoid(inner) * up


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, n, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part of the row)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(gate_up_ptr + row * 2 * n + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * n + n + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + at, gated(gate, up, GELU).to(out_ptr.dtype.element_ty), mask=inside)


def launch_swiglu(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [T, 2 n], out [T, n], both contiguous. Raises ValueError for other shapes."""
    _launch(gate_up, out, gelu=False)


def launch_geglu(gate_up: Tensor, out: Tensor) -> None:
    """As `launch_swiglu`, with the tanh form of GELU in place of SiLU."""
    _launch(gate_up, out, gelu=True)


def _launch(gate_up: Tensor, out: Tensor, gelu: bool) -> None:
    if gate_up.dim() != 2 or out.shape != (gate_up.shape[0], gate_up.shape[1] // 2) or gate_up.shape[1] % 2:
        raise ValueError(f"SwiGLU takes [T, 2 n] into [T, n], not {tuple(gate_up.shape)} into {tuple(out.shape)}.")
    if not gate_up.is_contiguous() or not out.is_contiguous():
        raise ValueError("SwiGLU takes contiguous tensors.")
    rows, n = out.shape
    params = launch_params("swiglu", capability())
    if rows:
        swiglu_kernel[(rows, triton.cdiv(n, params["BLOCK"]))](gate_up, out, n, GELU=gelu, **params)


geglu = register("geglu", "(Tensor gate_up, Tensor(a!) out) -> ()", launch_geglu, geglu_out)
swiglu = register("swiglu", "(Tensor gate_up, Tensor(a!) out) -> ()", launch_swiglu, swiglu_out)
