"""What a step's attention reads and writes, prepared once for all layers: index tensors, and views of gathered K and V.

On a CPU the definitions are also what people use, so a decoded token takes few torch calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import BatchMetadata, PagedStore
from kernels.kv_format import KV_FORMATS, KVFormat
from kernels.layer_groups import LayerGroup, LayerPlace, owners
from kernels.reference.gathers import Rows, as_rows, block_gathers, token_rows

# Gathered K and V of one layer for this many bytes at most, unless a single sequence needs more.
GATHER_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence's tokens `start:end` of the batch, and K [KV, D, seen], V [KV, seen, D] once gathered.

    `mask`, additive [query heads of a KV head * tokens, seen]; None: the only token sees all. The first `sinks` keys
    are sinks; `beyond`, bool [.., sinks], tells which lie beyond a token's window; None: all of them.
    """

    start: int
    end: int
    keys_t: Tensor
    values: Tensor
    mask: Tensor | None
    sinks: int
    beyond: Tensor | None


@dataclass(frozen=True, slots=True)
class Wave:
    """Sequences whose K and V are gathered together: `gathered` as the cache keeps them, with their scales where it
    has some, `computed` in the dtype of attention."""

    gathers: tuple[tuple[Rows, Tensor], ...]
    gathered: Tensor
    scales: Tensor | None
    computed: Tensor
    sequences: tuple[SequenceView, ...]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Where this step's K and V go in a group's blocks, and what each sequence reads."""

    stores: tuple[Rows, ...]
    scale_stores: tuple[Rows, ...]
    waves: tuple[Wave, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan of each group of layers, and which is whose; `owners` are the layers that store for each layer."""

    groups: tuple[GroupPlan, ...]
    places: Sequence[LayerPlace]
    owners: tuple[int, ...]
    format: KVFormat
    balance: Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class _Span:
    """What a sequence sees of its past: all of its `blocks`, or in groups with a window single `positions`, int64.

    `room` is how many tokens are gathered for it, `seen` how many of these it sees; `sinks` of them come first.
    """

    blocks: list[int]
    positions: Tensor | None
    room: int
    seen: int
    sinks: int


def plan_attention(
    meta: BatchMetadata, store: PagedStore, num_heads: int, head_dim: int, dtype: torch.dtype
) -> AttentionPlan:
    """Prepare `store_kv` and `attention` for one step; `dtype` is what attention computes in."""
    num_kv_heads = store.extents[0].shape[4]
    heads = (num_heads // num_kv_heads, num_kv_heads, head_dim)
    return AttentionPlan(
        groups=tuple(_plan_group(meta, store, number, heads, dtype) for number in range(len(store.groups))),
        places=store.places,
        owners=owners(store.places),
        format=KV_FORMATS[store.kv_format],
        balance=store.balance,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def _plan_group(
    meta: BatchMetadata, store: PagedStore, number: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> GroupPlan:
    """`heads`: query heads of a KV head, KV heads, head size."""
    block_size, tables = store.extents[0].shape[3], meta.block_tables[number]
    spans = _spans(meta, store.groups[number], tables, block_size)
    token_bytes, waves, first, room = 2 * heads[1] * heads[2] * 4, [], 0, 0
    for i, span in enumerate(spans):
        if room and (room + span.room) * token_bytes > GATHER_BYTES:
            waves.append(_plan_wave(meta, store, number, range(first, i), spans, heads, dtype))
            first, room = i, 0
        room += span.room
    waves.append(_plan_wave(meta, store, number, range(first, len(spans)), spans, heads, dtype))
    slots, per_extent = meta.slot_mapping[number], store.blocks_per_extent
    return GroupPlan(
        token_rows(slots, store.extents, per_extent), token_rows(slots, store.scale_extents, per_extent), tuple(waves)
    )


def _spans(meta: BatchMetadata, group: LayerGroup, tables: Tensor, block_size: int) -> list[_Span]:
    contexts = meta.context_lens_host
    if group.window is None:
        counts = [-(-length // block_size) for length in contexts]
        rows = [row[:count] for row, count in zip(tables.tolist(), counts, strict=True)]
        return [_Span(row, None, len(row) * block_size, n, 0) for row, n in zip(rows, contexts, strict=True)]
    spans = []
    for context, queries in zip(contexts, meta.query_lens, strict=True):
        start = group.recent_start(context - queries)
        positions = torch.arange(start, context, device=tables.device)
        if kept := min(group.sinks, start):
            positions = torch.cat((torch.arange(kept, device=tables.device), positions))
        sinks = kept if queries == 1 else min(group.sinks, kept + context - start)
        spans.append(_Span([], positions, len(positions), len(positions), sinks))
    return spans


def _plan_wave(
    meta: BatchMetadata,
    store: PagedStore,
    number: int,
    members: range,
    spans: Sequence[_Span],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> Wave:
    extent, own = store.extents[0], [spans[i] for i in members]
    (group_heads, num_kv_heads, head_dim), room = heads, sum(span.room for span in own)

    def gathered(name: str, extents: Sequence[Tensor]) -> Tensor:
        """A place [kinds, tokens, KV, width] for what the members see."""
        kinds, width = extents[0].shape[2], extents[0].shape[-1]
        return store.workspace(name, (kinds, room, num_kv_heads, width), extents[0].dtype)

    data = gathered("gathered", store.extents)
    gathers = _plan_gathers(meta, store, number, members, own, store.extents, data)
    scales = None
    if store.scale_extents:
        scales = gathered("scales", store.scale_extents)
        gathers += _plan_gathers(meta, store, number, members, own, store.scale_extents, scales)
    computed = data
    if extent.dtype != dtype:
        computed = store.workspace("computed", (2, room, num_kv_heads, head_dim), dtype)
    keys, values = computed.transpose(1, 2)
    sequences, offset = [], 0
    for i, span in zip(members, own, strict=True):
        seen, start = slice(offset, offset + span.seen), sum(meta.query_lens[:i])
        masks = _masks(
            store.groups[number], meta.query_lens[i], meta.context_lens_host[i], span, group_heads, data, dtype
        )
        places = (keys[:, seen].transpose(1, 2), values[:, seen])
        sequences.append(SequenceView(start, start + meta.query_lens[i], *places, masks[0], span.sinks, masks[1]))
        offset += span.room
    return Wave(gathers, data, scales, computed, tuple(sequences))


def _plan_gathers(
    meta: BatchMetadata,
    store: PagedStore,
    number: int,
    members: range,
    spans: Sequence[_Span],
    extents: Sequence[Tensor],
    out: Tensor,
) -> tuple[tuple[Rows, Tensor], ...]:
    """Single tokens for groups with a window: nothing that is out of sight is read."""
    block_size, per_extent = extents[0].shape[3], store.blocks_per_extent
    if store.groups[number].window is None:
        return block_gathers([block for span in spans for block in span.blocks], extents, per_extent, out)
    slots = []
    for i, span in zip(members, spans, strict=True):
        assert span.positions is not None
        blocks = meta.block_tables[number, i].to(torch.int64)[span.positions // block_size]
        slots.append(blocks * block_size + span.positions % block_size)
    target = as_rows(out, math.prod(out.shape[2:]))
    return tuple((rows, target) for rows in token_rows(torch.cat(slots), extents, per_extent, by_kind=True))


def _masks(
    group: LayerGroup, queries: int, context: int, span: _Span, group_heads: int, gathered: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """`SequenceView.mask` and `.beyond`; without a window the last query sees all, each before it a position less."""
    if queries == 1:
        return None, None
    if group.window is None or span.positions is None:
        mask = torch.full((queries, context), float("-inf"), dtype=dtype, device=gathered.device)
        return mask.triu_(context - queries + 1).repeat(group_heads, 1), None
    distance = torch.arange(context - queries, context, device=gathered.device)[:, None] - span.positions
    hidden = (distance < 0) | ((distance >= group.window) & (span.positions >= group.sinks))
    mask = torch.zeros(hidden.shape, dtype=dtype, device=gathered.device).masked_fill_(hidden, float("-inf"))
    beyond = distance[:, : span.sinks] >= group.window
    return mask.repeat(group_heads, 1), beyond.repeat(group_heads, 1)
