"""The paged cache's operations in plain torch: quantised formats, storing K and V, attention over block tables.

The kernels in `kernels.gpu` reach extents through a table of addresses, which torch can't read: here the lists of
extents are used and `extent_table` is ignored. Loops over rows: meant to be read and compared with, not to be fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_format import KV_FORMATS
from kernels.reference.kv_codes import (
    decode,
    dequantise_int4,
    dequantise_int8,
    encode,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
)
from kernels.reference.paged_checks import CacheGeometry, check_decode, check_prefill, check_store

__all__ = [
    "dequantise_int4",
    "dequantise_int8",
    "paged_decode",
    "paged_prefill",
    "quantise_fp8",
    "quantise_int4",
    "quantise_int8",
    "read_tokens",
    "store_kv",
]


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def _rotated(x: Tensor, positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    """float32 x [T, n, D] turned by positions [T]: rotate-half, angles in float32."""
    angles = (positions.float()[:, None] * inv_freq)[:, None]
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def store_kv(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    inv_freq: Tensor,
    rope_scale: float,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    balance: Tensor | None,
    keys_before_rope: bool,
    kv_format: str,
    layer: int,
    blocks_per_extent: int,
    data_extents: Sequence[Tensor],
    scale_extents: Sequence[Tensor],
    extent_table: Tensor,
    q_out: Tensor,
    sink_position: int = 0,
    sink_q_out: Tensor | None = None,
) -> None:
    """Norm (if weights are given) and RoPE of q and k; q into `q_out`, K and V into their slots of `layer`.

    qkv: fp16, bf16 or fp32 [T, (H + 2 KV) * D], all q heads, then k, then v. positions, slot_mapping: int64 [T]; a slot
    is block_id * block_size + offset, a negative one is not stored. inv_freq: float32 [D / 2]; cos and sin are
    multiplied by `rope_scale`. q_norm, k_norm: [D]. balance: float32 [KV, D], keys are divided and q multiplied by it.
    keys_before_rope: K is stored normed and not turned. q_out: [T, H, D]. `sink_q_out`, like it, takes q turned by
    positions up to `sink_position` (`kernels.layer_groups`). All of it is computed in float32.
    ValueError where shapes or dtypes don't fit.
    """
    geometry = check_store(qkv, positions, slot_mapping, inv_freq, kv_format, data_extents, q_out, sink_q_out)
    tokens, heads, head_dim = q_out.shape
    kv_heads = geometry.num_kv_heads
    q, k, v = qkv.float().view(tokens, -1, head_dim).split((heads, kv_heads, kv_heads), 1)
    q = _normed(q, q_norm, norm_eps)
    sink_q = _rotated(q, positions.clamp(max=sink_position), inv_freq, rope_scale)
    q = _rotated(q, positions, inv_freq, rope_scale)
    k = _normed(k, k_norm, norm_eps)
    if not keys_before_rope:
        k = _rotated(k, positions, inv_freq, rope_scale)
    if balance is not None:
        factors = balance.repeat_interleave(heads // kv_heads, 0)
        q, sink_q, k = q * factors, sink_q * factors, k / balance
    q_out.copy_(q)
    if sink_q_out is not None:
        sink_q_out.copy_(sink_q)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, geometry.block_size)
            extent, local = divmod(block, blocks_per_extent)
            scales = scale_extents[extent][local, layer, :, offset] if scale_extents else None
            _write(kv_format, k[token], v[token], data_extents[extent][local, layer, :, offset], scales)


def _write(kv_format: str, k: Tensor, v: Tensor, data: Tensor, scales: Tensor | None) -> None:
    """k, v [KV, D] into data [2, KV, width] and scales [planes, KV, scale_width] of one slot."""
    codes, code_scales = encode(KV_FORMATS[kv_format], torch.stack((k, v)))
    data.copy_(codes)
    if scales is not None and code_scales is not None:
        scales.copy_(code_scales)


def read_tokens(
    kv_format: str,
    data_extents: Sequence[Tensor],
    scale_extents: Sequence[Tensor],
    blocks_per_extent: int,
    layer: int,
    block_table: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """float32 K and V [count, KV, D] of the first `count` tokens of an int32 block table [blocks]."""
    block_size = data_extents[0].shape[3]
    keys, values = [], []
    for i, block in enumerate(block_table[: -(-count // block_size)].tolist()):
        extent, local = divmod(block, blocks_per_extent)
        length = min(block_size, count - i * block_size)
        data = data_extents[extent][local, layer, :, :length]
        scales = scale_extents[extent][local, layer, :, :length] if scale_extents else None
        k, v = decode(KV_FORMATS[kv_format], data, scales)
        keys.append(k)
        values.append(v)
    return torch.cat(keys), torch.cat(values)


def paged_decode(
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
) -> None:
    """Attention of one query token per row over the row's first `context_lens` cached tokens.

    q, out: fp16, bf16 or fp32 [B, H, D]. block_tables: int32 [B, blocks]. context_lens: int32 [B], the query's own
    token included; 0 gives zeros. `window` > 0: only the last `window` positions and the first `sinks` are visible;
    `sink_q`, like q, scores those that are visible as sinks alone.
    `soft_cap` > 0: scores become soft_cap * tanh(scores / soft_cap). key_inv_freq: float32 [D / 2] if the cache holds
    keys before RoPE; they are turned by their position in the block table, q's position being context_len - 1.
    newest: so many tokens are kept in the L2 cache in preference to older ones; no meaning here. partial_out,
    partial_stats: workspaces. ValueError where shapes or dtypes don't fit.
    """
    geometry = check_decode(
        q, block_tables, context_lens, key_inv_freq, kv_format, data_extents, partial_out, partial_stats, out, sink_q
    )
    for row, context in enumerate(context_lens.tolist()):
        if context == 0:
            out[row].zero_()
            continue
        keys, values = read_tokens(
            kv_format, data_extents, scale_extents, blocks_per_extent, layer, block_tables[row], context
        )
        own = slice(row, row + 1)
        queries = q[own], None if sink_q is None else sink_q[own]
        attend = _attend(*queries, keys, values, scale, window, sinks, soft_cap, key_inv_freq, rope_scale, geometry)
        out[row].copy_(attend[0])


def _attend(
    q: Tensor,
    sink_q: Tensor | None,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int,
    sinks: int,
    soft_cap: float,
    key_inv_freq: Tensor | None,
    rope_scale: float,
    geometry: CacheGeometry,
) -> Tensor:
    """float32 [n, H, D]: queries q [n, H, D] at the last n positions of keys, values [context, KV, D]."""
    context, group = keys.shape[0], q.shape[1] // geometry.num_kv_heads
    positions = torch.arange(context, device=q.device)
    if key_inv_freq is not None:
        keys = _rotated(keys, positions, key_inv_freq, rope_scale)
    own = positions[-q.shape[0] :, None]
    visible = positions <= own
    if window > 0:
        visible &= (positions > own - window) | (positions < sinks)
    # A key that no query sees may hold anything, also NaN, which a weight of zero would spread.
    seen = visible.any(0)
    keys, values, visible = keys[seen], values[seen], visible[:, seen]
    heads = keys.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), heads) * scale
    if sink_q is not None and window > 0:
        of_sinks = torch.einsum("qhd,khd->hqk", sink_q.float(), heads) * scale
        scores = torch.where(own - positions[seen] >= window, of_sinks, scores)
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


def paged_prefill(
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
) -> None:
    """Causal attention of each sequence's last tokens over all its cached tokens, their own included.

    q, out: fp16, bf16 or fp32 [T, H, D]; sequence s has the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1], of int32
    [S + 1], `max_query_len` at most. context_lens: int32 [S], with the chunk. Everything else is as for `paged_decode`;
    sequences without queries are skipped. `sink_q` is q wherever a token lies before window + sinks - 1. ValueError
    where shapes or dtypes don't fit.
    """
    geometry = check_prefill(
        q, cu_seqlens_q, block_tables, context_lens, key_inv_freq, kv_format, data_extents, out, sink_q
    )
    bounds = cu_seqlens_q.tolist()
    for row, context in enumerate(context_lens.tolist()):
        chunk = slice(bounds[row], bounds[row + 1])
        if chunk.start == chunk.stop:
            continue
        keys, values = read_tokens(
            kv_format, data_extents, scale_extents, blocks_per_extent, layer, block_tables[row], context
        )
        queries = q[chunk], None if sink_q is None else sink_q[chunk]
        attend = _attend(*queries, keys, values, scale, window, sinks, soft_cap, key_inv_freq, rope_scale, geometry)
        out[chunk].copy_(attend)
