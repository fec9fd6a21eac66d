"""Attention of one query token per sequence over its block table, split over the context, and the splits' reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tuning
from kernels.gpu.paged_decode_reduce import reduce_splits
from kernels.gpu.paged_decode_reduce import workspace_shapes as workspace_shapes
from kernels.gpu.tiles import LOG2E, load_tile, load_token_scale, locate, raw_scores, soft_capped, weighted_sum
from kernels.kv_format import KV_FORMATS
from kernels.reference import paged
from kernels.reference.paged_checks import check_decode
from kernels.registry import register

SCHEMA = (
    "(Tensor q, Tensor block_tables, Tensor context_lens, float scale, int window, int sinks, float soft_cap, "
    "Tensor? key_inv_freq, float rope_scale, int newest, str kv_format, int layer, int blocks_per_extent, "
    "Tensor[] data_extents, Tensor[] scale_extents, Tensor extent_table, Tensor(a!) partial_out, "
    "Tensor(b!) partial_stats, Tensor(c!) out, Tensor? sink_q=None) -> ()"
)


# fmt: off
@triton.jit
def _attend(
    first, last, start, kept, q, q_second, top, total, acc, block_table, extent_table, layer, head, inv_freq,
    rope_scale, scale, soft_cap, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, BLOCKS_PER_EXTENT: tl.constexpr, SCALE_PLANES: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ROTATE: tl.constexpr,
    USE_DOT: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, POLICY: tl.constexpr,
):
    # fmt: on
    """Online softmax over visible keys `first` to `last`: new (maximum, sum, accumulator), in powers of two."""
    for base in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        visible = base + tl.arange(0, BLOCK_N)
        valid = visible < last
        position = visible
        if WINDOW:
            position = tl.where(visible < kept, visible, visible - kept + start)
        block = tl.load(block_table + position // BLOCK_SIZE, mask=valid, other=0)
        data, scales, row, scale_row = locate(
            block, position % BLOCK_SIZE, layer, head, extent_table, LAYERS, BLOCK_SIZE, KV_HEADS, BLOCKS_PER_EXTENT,
            SCALE_PLANES,
        )  # fmt: skip
        scores = raw_scores(
            q, q_second, data, scales, row, scale_row, position, valid, inv_freq, rope_scale, D, DP, HALF, FORMAT,
            DTYPE, ROTATE, USE_DOT, POLICY,
        )  # fmt: skip
        if FORMAT == "int8":
            token_scale = load_token_scale(scales, scale_row, valid)
            scores = scores * token_scale[None, :]
        scores = scores * scale
        if SOFT_CAP:
            scores = soft_capped(scores, soft_cap)
        scores = tl.where(valid[None, :], scores * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        if FORMAT == "int8":
            weights = weights * token_scale[None, :]
        NEXT: tl.constexpr = BLOCK_SIZE * KV_HEADS
        values = load_tile(data, scales, row + NEXT, scale_row + NEXT, valid, 0, D, DP, D, FORMAT, DTYPE, POLICY)
        acc = acc * decay[:, None] + weighted_sum(weights, values, USE_DOT)
        top = new_top
    return top, total, acc


@triton.jit(do_not_specialize=["layer", "window", "sinks", "newest", "table_stride"])
def paged_decode_kernel(
    q_ptr,
    sink_q_ptr,
    block_tables,
    context_lens,
    inv_freq,
    extent_table,
    partial_out,
    partial_stats,
    table_stride,
    layer,
    window,
    sinks,
    newest,
    scale,
    soft_cap,
    rope_scale,
    H: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    HALF: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS_PER_EXTENT: tl.constexpr,
    SCALE_PLANES: tl.constexpr,
    FORMAT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ROTATE: tl.constexpr,
    NEWEST: tl.constexpr,
    USE_DOT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NSPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (KV * parts of a group, NSPLIT, B): up to ROWS query heads of a KV head over one split of a row's keys."""
    GROUP: tl.constexpr = H // KV_HEADS
    PARTS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    head = tl.program_id(0) // PARTS
    split = tl.program_id(1)
    batch_row = tl.program_id(2).to(tl.int64)
    member = (tl.program_id(0) % PARTS) * ROWS + tl.arange(0, ROWS)
    in_group = member < GROUP
    q_row = batch_row * H + head * GROUP + member
    stats = partial_stats + (q_row * NSPLIT + split) * 2

    context = tl.load(context_lens + batch_row)
    start = 0
    kept = 0
    if WINDOW:
        # Visible keys are counted without the gap between the sinks and the window, which nothing reads.
        start = tl.maximum(context - window, 0)
        kept = tl.minimum(sinks, start)
    visible = context - start + kept
    length = tl.cdiv(tl.cdiv(visible, BLOCK_N), NSPLIT) * BLOCK_N
    first = split * length
    last = tl.minimum(first + length, visible)
    if first >= last:
        tl.store(stats, float("-inf"), mask=in_group)
        return

    DTYPE: tl.constexpr = q_ptr.dtype.element_ty if USE_DOT else tl.float32
    if ROTATE:
        channel = tl.arange(0, HALF)
        inside = in_group[:, None] & (channel < D // 2)[None, :]
        pointer = q_ptr + q_row[:, None] * D + channel[None, :]
        q = tl.load(pointer, mask=inside, other=0.0).to(DTYPE)
        q_second = tl.load(pointer + D // 2, mask=inside, other=0.0).to(DTYPE)
    else:
        channel = tl.arange(0, DP)
        inside = in_group[:, None] & (channel < D)[None, :]
        q = tl.load(q_ptr + q_row[:, None] * D + channel[None, :], mask=inside, other=0.0).to(DTYPE)
        q_second = q
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    table = block_tables + batch_row * table_stride
    if SINKS:
        # What lies before the gap is scored by queries of its own.
        channel = tl.arange(0, DP)
        inside = in_group[:, None] & (channel < D)[None, :]
        sink_q = tl.load(sink_q_ptr + q_row[:, None] * D + channel[None, :], mask=inside, other=0.0).to(DTYPE)
        middle = tl.minimum(tl.maximum(kept, first), last)
        top, total, acc = _attend(
            first, middle, start, kept, sink_q, sink_q, top, total, acc, table, extent_table, layer, head, inv_freq,
            rope_scale, scale, soft_cap, D, DP, HALF, LAYERS, BLOCK_SIZE, KV_HEADS, BLOCKS_PER_EXTENT, SCALE_PLANES,
            FORMAT, DTYPE, WINDOW, SOFT_CAP, ROTATE, USE_DOT, BLOCK_N, STAGES, "evict_last",
        )  # fmt: skip
        first = middle
    # A load has one L2 policy for all its elements: older and newer keys take a loop each.
    if NEWEST:
        older = tl.maximum(tl.minimum(visible - newest, last) - first, 0)
        middle = tl.minimum(first + tl.cdiv(older, BLOCK_N) * BLOCK_N, last)
        top, total, acc = _attend(
            first, middle, start, kept, q, q_second, top, total, acc, table, extent_table, layer, head, inv_freq,
            rope_scale, scale, soft_cap, D, DP, HALF, LAYERS, BLOCK_SIZE, KV_HEADS, BLOCKS_PER_EXTENT, SCALE_PLANES,
            FORMAT, DTYPE, WINDOW, SOFT_CAP, ROTATE, USE_DOT, BLOCK_N, STAGES, "evict_first",
        )  # fmt: skip
        top, total, acc = _attend(
            middle, last, start, kept, q, q_second, top, total, acc, table, extent_table, layer, head, inv_freq,
            rope_scale, scale, soft_cap, D, DP, HALF, LAYERS, BLOCK_SIZE, KV_HEADS, BLOCKS_PER_EXTENT, SCALE_PLANES,
            FORMAT, DTYPE, WINDOW, SOFT_CAP, ROTATE, USE_DOT, BLOCK_N, STAGES, "evict_last",
        )  # fmt: skip
    else:
        top, total, acc = _attend(
            first, last, start, kept, q, q_second, top, total, acc, table, extent_table, layer, head, inv_freq,
            rope_scale, scale, soft_cap, D, DP, HALF, LAYERS, BLOCK_SIZE, KV_HEADS, BLOCKS_PER_EXTENT, SCALE_PLANES,
            FORMAT, DTYPE, WINDOW, SOFT_CAP, ROTATE, USE_DOT, BLOCK_N, STAGES, "evict_first",
        )  # fmt: skip
    channel = tl.arange(0, DP)
    pointer = partial_out + (q_row * NSPLIT + split)[:, None] * D + channel[None, :]
    tl.store(pointer, acc, mask=in_group[:, None] & (channel < D)[None, :])
    tl.store(stats, top, mask=in_group)
    tl.store(stats + 1, total, mask=in_group)


def launch_paged_decode(
    q: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    sinks: int,
    soft_cap: float,
    key_inv_freq: Tensor | None,
    rope_scale: float,
    newest: int,
    kv_format: str,
    layer: int,
    blocks_per_extent: int,
    data_extents: Sequence[Tensor],
    scale_extents: Sequence[Tensor],
    extent_table: Tensor,
    partial_out: Tensor,
    partial_stats: Tensor,
    out: Tensor,
    sink_q: Tensor | None = None,
    capability: int | None = None,
    params: Mapping[str, int] | None = None,
) -> None:
    """Launch both kernels; arguments and errors as `kernels.reference.paged.paged_decode` states them.

    `newest` takes effect from compute capability 8.0 on, for keys stored after RoPE; before, loads have L1 hints only.
    `capability` and `params` replace the current device's and the tuned values.
    """
    geometry = check_decode(
        q, block_tables, context_lens, key_inv_freq, kv_format, data_extents, partial_out, partial_stats, out, sink_q
    )
    batch, heads, head_dim = q.shape
    kv_heads, num_splits = geometry.num_kv_heads, partial_out.shape[2]
    if batch == 0:
        return
    # Only tensor cores make a dot of padded rows cheap, and they don't multiply float32.
    card = 75 if q.dtype == torch.float32 else capability or tuning.capability()
    # Turned keys are copied ahead all the same: their tiles leave no registers for direct loads.
    variant = "rotated" if key_inv_freq is not None else _hinted(kv_format) if newest > 0 else ""
    tuned = tuning.attention_params("paged_decode", head_dim, variant, card) | dict(params or {})
    group = heads // kv_heads
    rows = min(max(triton.next_power_of_2(group), tuned["MIN_ROWS"]), tuned["MAX_ROWS"])
    padded = max(triton.next_power_of_2(head_dim), 16)
    paged_decode_kernel[(kv_heads * triton.cdiv(group, rows), num_splits, batch)](
        q,
        sink_q,
        block_tables,
        context_lens,
        key_inv_freq,
        extent_table,
        partial_out,
        partial_stats,
        block_tables.stride(0),
        layer,
        window,
        sinks,
        newest,
        scale,
        soft_cap,
        rope_scale,
        H=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        DP=padded,
        HALF=max(triton.next_power_of_2(head_dim // 2), 16),
        LAYERS=geometry.num_layers,
        BLOCK_SIZE=geometry.block_size,
        BLOCKS_PER_EXTENT=blocks_per_extent,
        SCALE_PLANES=KV_FORMATS[kv_format].scale_planes,
        FORMAT=kv_format,
        WINDOW=window > 0,
        SINKS=sink_q is not None and window > 0,
        SOFT_CAP=soft_cap > 0,
        ROTATE=key_inv_freq is not None,
        NEWEST=newest > 0,
        USE_DOT=bool(tuned["USE_DOT"]),
        ROWS=rows,
        BLOCK_N=tuned["BLOCK_N"],
        NSPLIT=num_splits,
        STAGES=tuned["STAGES"],
        num_warps=tuned["num_warps"],
    )
    reduce_splits(partial_out, partial_stats, out, capability)


def newest_tokens() -> int:
    """How many tokens at the end of a context are asked to stay in the L2 cache of the current card."""
    return tuning.launch_params("paged_decode_newest", tuning.capability())["TOKENS"]


def _hinted(kv_format: str) -> str:
    return "hinted" if KV_FORMATS[kv_format].bits >= 16 else "coded_hinted"


paged_decode = register("paged_decode", SCHEMA, launch_paged_decode, paged.paged_decode)
