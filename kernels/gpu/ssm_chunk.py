"""Many tokens of Mamba-2's recurrence, from the state that a sequence has and into the state it gets.

A chunk of a prompt is scanned token by token with the state in registers. The dual form, in which tokens attend to each
other inside blocks, needs float32 products of tiles as wide as the state: their operands don't fit the registers beside
it (100 and more spilled accesses on sm_86 at 16 tokens), and rounding them to TF32 would cost the state its precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.ssm_step import check_ssm, time_step
from kernels.gpu.tuning import capability, launch_params
from kernels.reference.ssm import ssm_chunk_reference
from kernels.registry import register


@triton.jit
def ssm_chunk_kernel(
    state_ptr, query_starts_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, dt_bias_ptr, out_ptr,
    x_stride, dt_stride, b_stride, c_stride, out_stride, dt_min, dt_max, HEADS, HEADS_PER_GROUP,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, part of the head's channels)."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(query_starts_ptr + seq).to(tl.int64)
    end = tl.load(query_starts_ptr + seq + 1).to(tl.int64)
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, WIDTH)
    x_ptr += head * P
    out_ptr += head * P
    b_ptr += (head // HEADS_PER_GROUP) * N
    c_ptr += (head // HEADS_PER_GROUP) * N
    a, skip = tl.load(a_ptr + head).to(tl.float32), tl.load(d_ptr + head).to(tl.float32)
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    kept = state_ptr + (seq * HEADS + head) * (P * N) + p[:, None] * N + n[None, :]
    inside = (p < P)[:, None] & (n < N)[None, :]
    state = tl.load(kept, mask=inside, other=0.0)
    for t in tl.range(start, end):
        dt = time_step(tl.load(dt_ptr + t * dt_stride + head).to(tl.float32), bias, dt_min, dt_max)
        x = tl.load(x_ptr + t * x_stride + p, mask=p < P, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + t * b_stride + n, mask=n < N, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + t * c_stride + n, mask=n < N, other=0.0).to(tl.float32)
        state = state * tl.exp(dt * a) + (dt * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + skip * x
        tl.store(out_ptr + t * out_stride + p, y.to(out_ptr.dtype.element_ty), mask=p < P)
    tl.store(kept, state, mask=inside)


def launch_ssm_chunk(
    state: Tensor,
    query_starts: Tensor,
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
    """Shapes as in `kernels.reference.ssm.ssm_chunk_reference`; x, dt, B, C, out may be parts of wider rows.

    Raises ValueError for other shapes.
    """
    check_ssm(state, x.shape[0], x, dt, A, B, C, D, dt_bias, out)
    sequences, heads, channels, size = state.shape
    if query_starts.shape != (sequences + 1,) or query_starts.dtype != torch.int32:
        raise ValueError(f"query_starts must be int32 [{sequences + 1}], not {list(query_starts.shape)}.")
    params = launch_params("ssm_chunk", capability())
    grid = (sequences, heads, triton.cdiv(channels, params["BLOCK_P"]))
    if sequences:
        ssm_chunk_kernel[grid](
            state, query_starts, x, dt, A, B, C, D, dt_bias, out,
            x.stride(0), dt.stride(0), B.stride(0), C.stride(0), out.stride(0), dt_min, dt_max, heads,
            heads // B.shape[1], P=channels, N=size, WIDTH=triton.next_power_of_2(size), **params,
        )  # fmt: skip


ssm_chunk = register(
    "ssm_chunk",
    "(Tensor(a!) state, Tensor query_starts, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D,"
    " Tensor dt_bias, float dt_min, float dt_max, Tensor(b!) out) -> ()",
    launch_ssm_chunk,
    ssm_chunk_reference,
)
