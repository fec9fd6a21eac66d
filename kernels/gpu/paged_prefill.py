"""Causal attention of chunks of query tokens over block tables in which the chunks' K and V are already stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tuning
from kernels.gpu.tiles import LOG2E, load_tile, load_token_scale, locate, raw_scores, soft_capped, weighted_sum
from kernels.kv_format import KV_FORMATS
from kernels.reference import paged
from kernels.reference.paged_checks import check_prefill
from kernels.registry import register

SCHEMA = (
    "(Tensor q, Tensor cu_seqlens_q, Tensor block_tables, Tensor context_lens, int max_query_len, float scale, "
    "int window, int sinks, float soft_cap, Tensor? key_inv_freq, float rope_scale, str kv_format, int layer, "
    "int blocks_per_extent, Tensor[] data_extents, Tensor[] scale_extents, Tensor extent_table, Tensor(a!) out, "
    "Tensor? sink_q=None) -> ()"
)


# fmt: off
@triton.jit
def _attend(
    first, last, start, kept, own, window, sinks, q, q_second, top, total, acc, table, extent_table, layer, head,
    inv_freq, rope_scale, scale, soft_cap, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, BLOCKS_PER_EXTENT: tl.constexpr,
    SCALE_PLANES: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    ROTATE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Online softmax over visible keys `first` to `last`: new (maximum, sum, accumulator), in powers of two."""
    for base in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        key = base + tl.arange(0, BLOCK_N)
        valid = key < last
        position = key
        if WINDOW:
            position = tl.where(key < kept, key, key - kept + start)
        block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0)
        data, scales, k_row, scale_row = locate(
            block, position % BLOCK_SIZE, layer, head, extent_table, LAYERS, BLOCK_SIZE, KV_HEADS, BLOCKS_PER_EXTENT,
            SCALE_PLANES,
        )  # fmt: skip
        scores = raw_scores(
            q, q_second, data, scales, k_row, scale_row, position, valid, inv_freq, rope_scale, D, DP, HALF, FORMAT,
            DTYPE, ROTATE, True, "",
        )  # fmt: skip
        if FORMAT == "int8":
            token_scale = load_token_scale(scales, scale_row, valid)
            scores = scores * token_scale[None, :]
        scores = scores * scale
        if SOFT_CAP:
            scores = soft_capped(scores, soft_cap)
        seen = valid[None, :] & (position[None, :] <= own[:, None])
        if WINDOW:
            seen = seen & ((position[None, :] > own[:, None] - window) | (position < sinks)[None, :])
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row may see nothing of a tile, or nothing yet.
        finite = tl.maximum(new_top, -1e38)
        weights = tl.exp2(scores - finite[:, None])
        decay = tl.exp2(top - finite)
        total = total * decay + tl.sum(weights, 1)
        if FORMAT == "int8":
            weights = weights * token_scale[None, :]
        NEXT: tl.constexpr = BLOCK_SIZE * KV_HEADS
        values = load_tile(data, scales, k_row + NEXT, scale_row + NEXT, valid, 0, D, DP, D, FORMAT, DTYPE, "")
        acc = acc * decay[:, None] + weighted_sum(weights, values, True)
        top = new_top
    return top, total, acc


@triton.jit(do_not_specialize=["layer", "window", "sinks", "table_stride"])
def paged_prefill_kernel(
    q_ptr,
    sink_q_ptr,
    cu_seqlens_q,
    block_tables,
    context_lens,
    inv_freq,
    extent_table,
    out,
    table_stride,
    layer,
    window,
    sinks,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (row tiles, KV, S). A row is one query head of one token: a tile holds whole groups of adjacent tokens."""
    GROUP: tl.constexpr = H // KV_HEADS
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(cu_seqlens_q + sequence)
    queries = tl.load(cu_seqlens_q + sequence + 1) - begin
    if tile * BLOCK_M >= queries * GROUP:
        return
    context = tl.load(context_lens + sequence)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_chunk = row < queries * GROUP
    past = context - queries
    own = past + row // GROUP
    q_row = (begin + row // GROUP).to(tl.int64) * H + head * GROUP + row % GROUP
    end = past + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1) + 1
    start = 0
    kept = 0
    if WINDOW:
        # Keys are counted without the gap between the sinks and what the tile's first token sees.
        start = tl.maximum(past + tile * BLOCK_M // GROUP - window + 1, 0)
        kept = tl.minimum(sinks, start)
        if SINKS:
            # A sink may be beyond the window of some rows only.
            kept = tl.minimum(sinks, end)
            start = tl.maximum(start, kept)
    visible = end - start + kept

    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    if ROTATE:
        channel = tl.arange(0, HALF)
        inside = in_chunk[:, None] & (channel < D // 2)[None, :]
        pointer = q_ptr + q_row[:, None] * D + channel[None, :]
        q = tl.load(pointer, mask=inside, other=0.0).to(DTYPE)
        q_second = tl.load(pointer + D // 2, mask=inside, other=0.0).to(DTYPE)
    else:
        channel = tl.arange(0, DP)
        inside = in_chunk[:, None] & (channel < D)[None, :]
        q = tl.load(q_ptr + q_row[:, None] * D + channel[None, :], mask=inside, other=0.0).to(DTYPE)
        q_second = q
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    first = 0
    if SINKS:
        # Also within the window, where both queries are the same.
        channel = tl.arange(0, DP)
        inside = in_chunk[:, None] & (channel < D)[None, :]
        sink_q = tl.load(sink_q_ptr + q_row[:, None] * D + channel[None, :], mask=inside, other=0.0).to(DTYPE)
        top, total, acc = _attend(
            first, kept, start, kept, own, window, sinks, sink_q, sink_q, top, total, acc, table, extent_table,
            layer, head, inv_freq, rope_scale, scale, soft_cap, D, DP, HALF, LAYERS, BLOCK_SIZE, KV_HEADS,
            BLOCKS_PER_EXTENT, SCALE_PLANES, FORMAT, DTYPE, WINDOW, SOFT_CAP, ROTATE, BLOCK_N, STAGES,
        )  # fmt: skip
        first = kept
    top, total, acc = _attend(
        first, visible, start, kept, own, window, sinks, q, q_second, top, total, acc, table, extent_table, layer,
        head, inv_freq, rope_scale, scale, soft_cap, D, DP, HALF, LAYERS, BLOCK_SIZE, KV_HEADS, BLOCKS_PER_EXTENT,
        SCALE_PLANES, FORMAT, DTYPE, WINDOW, SOFT_CAP, ROTATE, BLOCK_N, STAGES,
    )  # fmt: skip
    channel = tl.arange(0, DP)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    pointer = out + q_row[:, None] * D + channel[None, :]
    tl.store(pointer, result.to(out.dtype.element_ty), mask=in_chunk[:, None] & (channel < D)[None, :])


def launch_paged_prefill(
    q: Tensor,
    cu_seqlens_q: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
    sinks: int,
    soft_cap: float,
    key_inv_freq: Tensor | None,
    rope_scale: float,
    kv_format: str,
    layer: int,
    blocks_per_extent: int,
    data_extents: Sequence[Tensor],
    scale_extents: Sequence[Tensor],
    extent_table: Tensor,
    out: Tensor,
    sink_q: Tensor | None = None,
    capability: int | None = None,
    params: Mapping[str, int] | None = None,
) -> None:
    """Launch the kernel; arguments and errors as `kernels.reference.paged.paged_prefill` states them.

    `capability` and `params` replace the current device's and the tuned values.
    """
    geometry = check_prefill(
        q, cu_seqlens_q, block_tables, context_lens, key_inv_freq, kv_format, data_extents, out, sink_q
    )
    _, heads, head_dim = q.shape
    kv_heads, sequences = geometry.num_kv_heads, block_tables.shape[0]
    if q.numel() == 0:
        return
    # Only tensor cores make a dot of padded rows cheap, and they don't multiply float32.
    card = 75 if q.dtype == torch.float32 else capability or tuning.capability()
    variant = "rotated" if key_inv_freq is not None else "coded" if KV_FORMATS[kv_format].bits < 16 else ""
    tuned = tuning.attention_params("paged_prefill", head_dim, variant, card) | dict(params or {})
    grid = (triton.cdiv(max_query_len * (heads // kv_heads), tuned["BLOCK_M"]), kv_heads, sequences)
    paged_prefill_kernel[grid](
        q,
        sink_q,
        cu_seqlens_q,
        block_tables,
        context_lens,
        key_inv_freq,
        extent_table,
        out,
        block_tables.stride(0),
        layer,
        window,
        sinks,
        scale,
        soft_cap,
        rope_scale,
        H=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        DP=max(triton.next_power_of_2(head_dim), 16),
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
        BLOCK_M=tuned["BLOCK_M"],
        BLOCK_N=tuned["BLOCK_N"],
        STAGES=tuned["STAGES"],
        num_warps=tuned["num_warps"],
    )


paged_prefill = register("paged_prefill", SCHEMA, launch_paged_prefill, paged.paged_prefill)
