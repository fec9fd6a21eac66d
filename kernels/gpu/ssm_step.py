"""One decoded token of Mamba-2's recurrence: each head's state is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tuning import capability, launch_params
from kernels.reference.ssm import ssm_step_reference
from kernels.registry import register


@triton.jit
def time_step(dt, bias, dt_min, dt_max):
    """softplus(dt + bias) within its limits; log(1 + e) by way of the rounded 1 + e, exact for small e too."""
    x = dt + bias
    grown = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + grown
    log = tl.where(one_more == 1.0, grown, tl.log(one_more) * (grown / tl.where(one_more == 1.0, 1.0, one_more - 1.0)))
    return tl.minimum(tl.maximum(tl.where(x > 20.0, x, log), dt_min), dt_max)


@triton.jit
def ssm_step_kernel(
    state_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, dt_bias_ptr, out_ptr,
    x_stride, dt_stride, b_stride, c_stride, out_stride, dt_min, dt_max, HEADS, HEADS_PER_GROUP,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, part of the head's channels); WIDTH is N or the power of 2 above."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, WIDTH)
    group = (head // HEADS_PER_GROUP) * N
    dt = tl.load(dt_ptr + seq * dt_stride + head).to(tl.float32)
    dt = time_step(dt, tl.load(dt_bias_ptr + head).to(tl.float32), dt_min, dt_max)
    decay = tl.exp(dt * tl.load(a_ptr + head).to(tl.float32))
    x = tl.load(x_ptr + seq * x_stride + head * P + p, mask=p < P, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + seq * b_stride + group + n, mask=n < N, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + seq * c_stride + group + n, mask=n < N, other=0.0).to(tl.float32)
    kept = state_ptr + (seq * HEADS + head) * (P * N) + p[:, None] * N + n[None, :]
    inside = (p < P)[:, None] & (n < N)[None, :]
    state = tl.load(kept, mask=inside, other=0.0) * decay + (dt * x)[:, None] * b[None, :]
    tl.store(kept, state, mask=inside)
    y = tl.sum(state * c[None, :], 1) + tl.load(d_ptr + head).to(tl.float32) * x
    tl.store(out_ptr + seq * out_stride + head * P + p, y.to(out_ptr.dtype.element_ty), mask=p < P)


def launch_ssm_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    out: Tensor,
) -> None:
    """Shapes as in `kernels.reference.ssm.ssm_step_reference`; x, dt, B, C, out may be parts of wider rows.

    Raises ValueError for other shapes.
    """
    check_ssm(state, state.shape[0], x, dt, A, B, C, D, dt_bias, out)
    sequences, heads, channels, size = state.shape
    params = launch_params("ssm_step", capability())
    grid = (sequences, heads, triton.cdiv(channels, params["BLOCK_P"]))
    if sequences:
        ssm_step_kernel[grid](
            state, x, dt, A, B, C, D, dt_bias, out, x.stride(0), dt.stride(0), B.stride(0), C.stride(0), out.stride(0),
            dt_min, dt_max, heads, heads // B.shape[1],
            P=channels, N=size, WIDTH=triton.next_power_of_2(size), **params,
        )  # fmt: skip


def check_ssm(
    state: Tensor, tokens: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Raise ValueError unless shapes fit `state` [S, H, P, N] and `tokens`, and a token's elements are adjacent."""
    if state.dim() != 4 or state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"The state must be contiguous float32 [S, H, P, N], not {state.dtype} {list(state.shape)}.")
    _, heads, channels, size = state.shape
    groups = B.shape[1] if B.dim() == 3 else 0
    if not groups or heads % groups:
        raise ValueError(f"B must be [tokens, groups, {size}] with groups that divide {heads} heads.")
    wanted = (
        ("x", x, (tokens, heads, channels)),
        ("dt", dt, (tokens, heads)),
        ("B", B, (tokens, groups, size)),
        ("C", C, (tokens, groups, size)),
        ("out", out, (tokens, heads, channels)),
        *((name, tensor, (heads,)) for name, tensor in (("A", A), ("D", D), ("dt_bias", dt_bias))),
    )
    for name, tensor, shape in wanted:
        inner = tensor if tensor.dim() == 1 else tensor[:1]
        if tensor.shape != shape or not inner.is_contiguous():
            raise ValueError(f"{name} must be {list(shape)} with adjacent elements, not {list(tensor.shape)}.")


ssm_step = register(
    "ssm_step",
    "(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, float dt_min,"
    " float dt_max, Tensor(b!) out) -> ()",
    launch_ssm_step,
    ssm_step_reference,
)
