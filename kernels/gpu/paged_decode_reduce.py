"""The second half of split-KV decode: each row's splits become one result."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tuning


@triton.jit
def paged_decode_reduce_kernel(
    partial_out,
    partial_stats,
    out,
    D: tl.constexpr,
    DP: tl.constexpr,
    NSPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (B * H,). SPLITS is NSPLIT up to a power of two. A row without keys gives zeros."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, DP)
    split = tl.arange(0, SPLITS)
    at = row * NSPLIT + split
    top = tl.load(partial_stats + at * 2, mask=split < NSPLIT, other=float("-inf"))
    used = top > float("-inf")
    total = tl.load(partial_stats + at * 2 + 1, mask=used, other=0.0)
    weight = tl.where(used, tl.exp2(top - tl.maximum(tl.max(top, 0), -1e38)), 0.0)
    mask = used[:, None] & (channel < D)[None, :]
    acc = tl.load(partial_out + at[:, None] * D + channel[None, :], mask=mask, other=0.0)
    denominator = tl.sum(weight * total, 0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(denominator > 0.0, denominator, 1.0)
    tl.store(out + row * D + channel, result.to(out.dtype.element_ty), mask=channel < D)


def workspace_shapes(batch: int, num_heads: int, head_dim: int, num_splits: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the float32 workspaces `partial_out` and `partial_stats` (maximum and sum of each split)."""
    return (batch, num_heads, num_splits, head_dim), (batch, num_heads, num_splits, 2)


def reduce_splits(partial_out: Tensor, partial_stats: Tensor, out: Tensor, capability: int | None = None) -> None:
    """Workspaces as `workspace_shapes` says, out [B, H, D] of any float dtype, all contiguous."""
    batch, heads, num_splits, head_dim = partial_out.shape
    tuned = tuning.launch_params("paged_decode_reduce", capability or tuning.capability())
    paged_decode_reduce_kernel[(batch * heads,)](
        partial_out,
        partial_stats,
        out,
        D=head_dim,
        DP=triton.next_power_of_2(head_dim),
        NSPLIT=num_splits,
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=tuned["num_warps"],
    )
