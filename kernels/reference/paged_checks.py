"""Do the arguments of the paged cache's operations fit together? Asked by kernels' launchers and definitions alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv_format import KV_FORMATS


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int


def cache_geometry(kv_format: str, data_extents: Sequence[Tensor], head_dim: int) -> CacheGeometry:
    """What the first data extent's shape says; ValueError if it is not of this format and head size."""
    if kv_format not in KV_FORMATS:
        raise ValueError(f"there is no KV format {kv_format!r}")
    fmt = KV_FORMATS[kv_format]
    if not data_extents or data_extents[0].dim() != 6:
        raise ValueError("the cache needs at least one data extent of six dimensions")
    _, num_layers, kinds, block_size, num_kv_heads, width = data_extents[0].shape
    if kinds != 2 or width != fmt.data_width(head_dim) or data_extents[0].dtype != fmt.dtype:
        raise ValueError(f"a data extent of {kv_format} with head size {head_dim} has another shape or dtype")
    if num_layers * 2 * block_size * num_kv_heads * width >= 2**31:
        raise ValueError("a block must have fewer than 2**31 elements")
    return CacheGeometry(num_layers, block_size, num_kv_heads, head_dim)


def check_store(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    inv_freq: Tensor,
    kv_format: str,
    data_extents: Sequence[Tensor],
    q_out: Tensor,
    sink_q_out: Tensor | None,
) -> CacheGeometry:
    """ValueError unless the shapes and dtypes of `store_kv` fit together."""
    tokens, heads, head_dim = q_out.shape
    geometry = cache_geometry(kv_format, data_extents, head_dim)
    if qkv.shape != (tokens, (heads + 2 * geometry.num_kv_heads) * head_dim) or qkv.stride(-1) != 1:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not hold q, k and v for q_out {tuple(q_out.shape)}")
    if heads % geometry.num_kv_heads:
        raise ValueError(f"{heads} query heads can't share {geometry.num_kv_heads} KV heads evenly")
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        if tensor.shape != (tokens,) or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int64 [{tokens}]")
    if inv_freq.shape != (head_dim // 2,) or inv_freq.dtype != torch.float32 or not inv_freq.is_contiguous():
        raise ValueError(f"inv_freq must be contiguous float32 [{head_dim // 2}]")
    if not q_out.is_contiguous():
        raise ValueError("q_out must be contiguous")
    if sink_q_out is not None and not _alike(sink_q_out, q_out):
        raise ValueError("sink_q_out must be as q_out")
    return geometry


def _alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype and tensor.is_contiguous()


def check_cache_reads(
    q: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    key_inv_freq: Tensor | None,
    sink_q: Tensor | None,
    geometry: CacheGeometry,
) -> None:
    """ValueError unless the shapes and dtypes that both attention ops share fit together."""
    sequences = block_tables.shape[0]
    if q.dim() != 3 or not q.is_contiguous() or q.shape[1] % geometry.num_kv_heads:
        raise ValueError(f"q must be contiguous [T, H, D], H a multiple of {geometry.num_kv_heads}")
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32 or block_tables.stride(1) != 1:
        raise ValueError("block_tables must be int32 [sequences, blocks] with adjacent blocks")
    if context_lens.shape != (sequences,) or context_lens.dtype != torch.int32 or not context_lens.is_contiguous():
        raise ValueError(f"context_lens must be contiguous int32 [{sequences}]")
    if key_inv_freq is not None:
        half = geometry.head_dim // 2
        if key_inv_freq.shape != (half,) or key_inv_freq.dtype != torch.float32 or not key_inv_freq.is_contiguous():
            raise ValueError(f"key_inv_freq must be contiguous float32 [{half}]")
    if sink_q is not None and (key_inv_freq is not None or not _alike(sink_q, q)):
        raise ValueError("sink_q must be as q, and keys turned when they are stored")


def check_decode(
    q: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    key_inv_freq: Tensor | None,
    kv_format: str,
    data_extents: Sequence[Tensor],
    partial_out: Tensor,
    partial_stats: Tensor,
    out: Tensor,
    sink_q: Tensor | None,
) -> CacheGeometry:
    """ValueError unless the shapes and dtypes of `paged_decode` fit together."""
    geometry = cache_geometry(kv_format, data_extents, q.shape[-1])
    check_cache_reads(q, block_tables, context_lens, key_inv_freq, sink_q, geometry)
    if block_tables.shape[0] != q.shape[0] or out.shape != q.shape or not out.is_contiguous():
        raise ValueError("block_tables and a contiguous out must have a row for each row of q")
    splits = partial_out.shape[2]
    wanted = ((partial_out, (*q.shape[:2], splits, q.shape[2])), (partial_stats, (*q.shape[:2], splits, 2)))
    if any(t.shape != shape or t.dtype != torch.float32 or not t.is_contiguous() for t, shape in wanted):
        raise ValueError("the workspaces must be contiguous float32 tensors of the shapes `workspace_shapes` gives")
    return geometry


def check_prefill(
    q: Tensor,
    cu_seqlens_q: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    key_inv_freq: Tensor | None,
    kv_format: str,
    data_extents: Sequence[Tensor],
    out: Tensor,
    sink_q: Tensor | None,
) -> CacheGeometry:
    """ValueError unless the shapes and dtypes of `paged_prefill` fit together."""
    geometry = cache_geometry(kv_format, data_extents, q.shape[-1])
    check_cache_reads(q, block_tables, context_lens, key_inv_freq, sink_q, geometry)
    bounds = (block_tables.shape[0] + 1,)
    if cu_seqlens_q.shape != bounds or cu_seqlens_q.dtype != torch.int32 or not cu_seqlens_q.is_contiguous():
        raise ValueError(f"cu_seqlens_q must be contiguous int32 [{bounds[0]}]")
    if out.shape != q.shape or not out.is_contiguous():
        raise ValueError("out must be contiguous and of q's shape")
    return geometry
