"""Mamba-2's causal convolution per channel, with what came before a sequence's tokens kept as its state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tuning import capability, launch_params
from kernels.reference.ssm import causal_conv_reference
from kernels.registry import register


@triton.jit
def _input(state_row, x_ptr, x_stride, channel, start, at, valid, BEFORE: tl.constexpr):
    """float32 inputs at tokens `at`; those before `start` come from the state."""
    fresh = tl.load(x_ptr + at.to(tl.int64) * x_stride + channel, mask=valid & (at >= start), other=0.0)
    old = tl.load(state_row + at - start + BEFORE, mask=valid & (at < start), other=0.0)
    return tl.where(at >= start, fresh.to(tl.float32), old.to(tl.float32))


@triton.jit
def causal_conv_kernel(
    state_ptr, query_starts_ptr, x_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, out_stride, channels,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (sequence, part of the channels): owns that part of the state. WIDTH: a power of 2 from TAPS - 1 on."""
    seq = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    start, end = tl.load(query_starts_ptr + seq), tl.load(query_starts_ptr + seq + 1)
    row = state_ptr + (seq * channels + channel) * (TAPS - 1)
    for first in tl.range(start, end, BLOCK_T):
        token = (first + tl.arange(0, BLOCK_T))[:, None]
        valid = (token < end) & inside[None, :]
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            weight = tl.load(weight_ptr + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            at = token + (tap - TAPS + 1)
            total += weight[None, :] * _input(
                row[None, :], x_ptr, x_stride, channel[None, :], start, at, valid, TAPS - 1
            )
        written = out_ptr + token.to(tl.int64) * out_stride + channel[None, :]
        tl.store(written, (total * tl.sigmoid(total)).to(out_ptr.dtype.element_ty), mask=valid)
    slot = tl.arange(0, WIDTH)[None, :]
    kept = inside[:, None] & (slot < TAPS - 1)
    last = _input(row[:, None], x_ptr, x_stride, channel[:, None], start, end - (TAPS - 1) + slot, kept, TAPS - 1)
    # Others of the program's threads may still be reading what is overwritten now.
    tl.debug_barrier()
    tl.store(row[:, None] + slot, last.to(state_ptr.dtype.element_ty), mask=kept)


def launch_causal_conv(
    state: Tensor, query_starts: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Shapes as in `kernels.reference.ssm.causal_conv_reference`; x and out may be parts of wider rows.

    Raises ValueError for other shapes.
    """
    channels, taps = weight.shape
    sequences = state.shape[0]
    if state.shape != (sequences, channels, taps - 1) or taps < 2:
        raise ValueError(f"The state must be [S, {channels}, {taps - 1}], not {list(state.shape)}.")
    if query_starts.shape != (sequences + 1,) or query_starts.dtype != torch.int32:
        raise ValueError(f"query_starts must be int32 [{sequences + 1}], not {list(query_starts.shape)}.")
    if x.shape != out.shape or x.shape[1:] != (channels,) or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"x and out must be [T, {channels}] with adjacent channels, not {list(x.shape)}.")
    if not state.is_contiguous() or not weight.is_contiguous() or (bias is not None and bias.shape != (channels,)):
        raise ValueError(f"State and weight must be contiguous and the bias [{channels}].")
    params = launch_params("causal_conv", capability())
    if sequences:
        causal_conv_kernel[(sequences, triton.cdiv(channels, params["BLOCK_C"]))](
            state, query_starts, x, weight, bias, out, x.stride(0), out.stride(0), channels,
            TAPS=taps, WIDTH=triton.next_power_of_2(taps - 1), **params,
        )  # fmt: skip


causal_conv = register(
    "causal_conv",
    "(Tensor(a!) state, Tensor query_starts, Tensor x, Tensor weight, Tensor? bias, Tensor(b!) out) -> ()",
    launch_causal_conv,
    causal_conv_reference,
)
