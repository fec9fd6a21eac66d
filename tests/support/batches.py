"""Batches for models and kernels without an engine: positions, slots and tables from plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.kv_cache.spec import KVCacheSpec, LayerGroup, LayerPlace
from engine.models.registry import DecoderModel
from kernels.kv_format import KV_FORMATS

BLOCK_SIZE = 4


def make_metadata(
    items: Sequence[tuple[int, int, list[int]]],
    block_size: int = BLOCK_SIZE,
    state_slots: tuple[int, ...] = (),
    cache: KVCache | None = None,
) -> AttentionMetadata:
    """Metadata of sequences given as (tokens cached before, tokens of this step, block table); all rows wanted.

    Each group of the layers of `cache` has a part of its blocks, to which tables are shifted, and the null block in
    place of blocks that no token of the step sees.
    """
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
    groups = (LayerGroup(),) if cache is None else cache.groups
    shifts = [0 if cache is None else i * (cache.capacity_blocks // len(groups)) for i in range(len(groups))]
    grouped = [
        [
            [b + shift if _is_seen(group, i * block_size, block_size, start) else 0 for i, b in enumerate(table)]
            + [0] * (width - len(table))
            for table, (start, _, _) in zip(tables, items, strict=True)
        ]
        for group, shift in zip(groups, shifts, strict=True)
    ]
    return AttentionMetadata(
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor([[slot + shift * block_size for slot in slots] for shift in shifts]),
        block_tables=torch.tensor(grouped, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        logit_rows=torch.arange(len(positions)),
        query_lens=lens,
        context_lens_host=contexts,
        state_slots=state_slots,
    )


def _is_seen(group: LayerGroup, first: int, count: int, position: int) -> bool:
    """Whether a query at `position` or after it sees one of the `count` positions from `first` on."""
    return first < group.sinks or first + count > group.recent_start(position)


def layer_groups(
    windows: Sequence[int | None], sinks: int = 0
) -> tuple[tuple[LayerGroup, ...], tuple[LayerPlace, ...]]:
    """A group for each kind of layers, and each layer's place; sinks where there is a window."""
    kinds = sorted(set(windows), key=lambda window: window or 0)
    groups = tuple(LayerGroup(window, sinks if window else 0) for window in kinds)
    return groups, tuple(LayerPlace(kinds.index(w), windows[:i].count(w)) for i, w in enumerate(windows))


def poison_unseen(cache: KVCache, table: Sequence[int], position: int) -> None:
    """NaN, where the format has any, in all slots of a sequence that no query from `position` on sees."""
    for number, group in enumerate(cache.groups):
        shift = number * (cache.capacity_blocks // len(cache.groups))
        for unseen in range(group.sinks, group.recent_start(position)):
            index, offset = divmod(unseen, cache.spec.block_size)
            extent, row = divmod(table[index] + shift, cache.blocks_per_extent)
            for extents in (cache.extents, cache.scale_extents):
                if extents and extents[extent].is_floating_point():
                    extents[extent][row, :, :, offset] = float("nan")


def make_cache(
    model: DecoderModel,
    blocks: int = 64,
    kv_format: str = "fp32",
    blocks_per_extent: int = 64,
    block_size: int = BLOCK_SIZE,
    window: int | None = None,
    sinks: int = 0,
) -> KVCache:
    """A cache for `model` filled with NaN, so that whatever is read before it is written shows: so many blocks for each
    group of layers, which have the model's windows or, where it has none, `window`."""
    config = model.config
    groups, places = layer_groups([own or window for own in config.windows] or [None], sinks)
    places = tuple(places[owner] for owner in config.kv_owners) or places
    stores = max((place.store + 1 for place in places), default=0) if config.num_attention_layers else 0
    sizes = (stores, config.num_kv_heads, config.head_dim, block_size, KV_FORMATS[kv_format])
    spec = KVCacheSpec(*sizes, groups, places if stores else ())
    cache = KVCache(spec, model.device, extent_bytes=blocks_per_extent * spec.block_bytes)
    cache.grow(blocks * len(groups))
    for extent in (*cache.extents, *cache.scale_extents):
        extent.fill_(float("nan") if extent.is_floating_point() else 85)
    return cache
