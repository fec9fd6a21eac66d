"""Batches for models and kernels without an engine: positions, slots and tables from plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.kv_cache.spec import KVCacheSpec
from engine.models.registry import DecoderModel
from kernels.kv_format import KV_FORMATS

BLOCK_SIZE = 4


def make_metadata(
    items: Sequence[tuple[int, int, list[int]]], block_size: int = BLOCK_SIZE, state_slots: tuple[int, ...] = ()
) -> AttentionMetadata:
    """Metadata of sequences given as (tokens cached before, tokens of this step, block table); all rows wanted."""
    positions = [p for start, count, _ in items for p in range(start, start + count)]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for start, count, table in items
        for p in range(start, start + count)
    ]
    lens = tuple(count for _, count, _ in items)
    contexts = tuple(start + count for start, count, _ in items)
    tables = [table[: -(-context // block_size)] for (_, _, table), context in zip(items, contexts, strict=True)]
    width = max(len(table) for table in tables)
    return AttentionMetadata(
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor([slots]),
        block_tables=torch.tensor([[table + [0] * (width - len(table)) for table in tables]], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        logit_rows=torch.arange(len(positions)),
        query_lens=lens,
        context_lens_host=contexts,
        state_slots=state_slots,
    )


def make_cache(
    model: DecoderModel,
    blocks: int = 64,
    kv_format: str = "fp32",
    blocks_per_extent: int = 64,
    block_size: int = BLOCK_SIZE,
) -> KVCache:
    """A cache for `model` filled with NaN, so that whatever is read before it is written shows."""
    config = model.config
    spec = KVCacheSpec(
        config.num_attention_layers, config.num_kv_heads, config.head_dim, block_size, KV_FORMATS[kv_format]
    )
    cache = KVCache(spec, model.device, extent_bytes=blocks_per_extent * spec.block_bytes)
    cache.grow(blocks)
    for extent in (*cache.extents, *cache.scale_extents):
        extent.fill_(float("nan") if extent.is_floating_point() else 85)
    return cache
