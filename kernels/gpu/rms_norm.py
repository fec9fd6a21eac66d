"""RMSNorm, alone or after the residual sum that goes before it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tuning import capability, launch_params
from kernels.reference.normalization import add_rms_norm_out, rms_norm_out
from kernels.registry import register

MAX_WIDTH = 32768
"""A row is held in the registers of one program."""


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, n, eps,
    x_stride, x_head_stride, residual_stride, residual_head_stride, out_stride, out_head_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, head). `residual_ptr` None: no sum. Rounds where the reference in torch rounds."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + token * x_stride + head * x_head_stride + at, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        kept = residual_ptr + token * residual_stride + head * residual_head_stride + at
        total = (x + tl.load(kept, mask=inside, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(kept, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / n + eps)).to(x_ptr.dtype.element_ty).to(tl.float32)
    out = out_ptr + token * out_stride + head * out_head_stride + at
    tl.store(out, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x, out [T, n] or [T, heads, n] with adjacent elements in the last dimension; out may be x. weight [n].

    Raises ValueError for other shapes and strides.
    """
    _launch(x, None, weight, eps, out)


def launch_add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += x in place, out = RMSNorm of it; shapes as for `launch_rms_norm`, out may be x."""
    _launch(x, residual, weight, eps, out)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    n = x.shape[-1]
    tensors = [x, out] if residual is None else [x, out, residual]
    if x.dim() not in (2, 3) or weight.shape != (n,) or any(t.shape != x.shape for t in tensors):
        raise ValueError(f"RMSNorm takes equal [T, n] or [T, heads, n] and a weight [n], not x {tuple(x.shape)}.")
    if n > MAX_WIDTH or any(t.stride(-1) != 1 for t in (*tensors, weight)):
        raise ValueError(f"RMSNorm takes rows of at most {MAX_WIDTH} adjacent elements.")
    block = triton.next_power_of_2(n)
    params = launch_params("rms_norm", capability())
    warps = min(max(block // (32 * params["elements_per_thread"]), 1), params["max_warps"])
    grid = (x.shape[0], x.shape[1] if x.dim() == 3 else 1)
    if x.numel():
        rms_norm_kernel[grid](
            x, residual, weight, out, n, eps, *_strides(x), *_strides(residual), *_strides(out),
            BLOCK=block, num_warps=warps,
        )  # fmt: skip


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Of token and head."""
    if tensor is None:
        return 0, 0
    return tensor.stride(0), tensor.stride(1) if tensor.dim() == 3 else 0


rms_norm = register(
    "rms_norm", "(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()", launch_rms_norm, rms_norm_out
)
add_rms_norm = register(
    "add_rms_norm",
    "(Tensor(a!) residual, Tensor x, Tensor weight, float eps, Tensor(b!) out) -> ()",
    launch_add_rms_norm,
    add_rms_norm_out,
)
