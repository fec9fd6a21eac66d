"""Every operation of the decoder in plain torch: the definition that faster kernels are compared with.

On a CPU this is also what people use, so a decoded token takes few torch calls: index tensors and views are prepared
once per step (`AttentionPlan`) and serve all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import BatchMetadata, PagedStore
from kernels.kv_format import KV_FORMATS, KVFormat
from kernels.reference.kv_codes import decode, encode

# Gathered K and V of one layer for this many bytes at most, unless a single sequence needs more.
GATHER_BYTES = 64 * 2**20


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] / rms(x) * weight [n]; the mean square is taken in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 n] -> silu(gate) * up [T, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [T, n, D] in place. cos, sin: [T, 1, D], the first half of sin negated (see `rotary_tables`)."""
    turned = torch.roll(heads, heads.shape[-1] // 2, dims=-1)
    torch.addcmul(heads * cos, turned, sin, out=heads)


def rotary_tables(positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sign-folded sin [T, 1, D] for int64 positions [T] and float32 inv_freq [D / 2]."""
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] @ weight [out, in]ᵀ + bias, computed in the weight's dtype, returned in x's."""
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)


def copy_blocks(extents: Sequence[Tensor], blocks_per_extent: int, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, all layers, in order; pairs of (source, target) block ids."""
    for source, target in pairs:
        a, b = divmod(source, blocks_per_extent), divmod(target, blocks_per_extent)
        extents[b[0]][b[1]].copy_(extents[a[0]][a[1]])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one extent, the same in every layer: `index[layer]` int64, and the batch rows they belong to."""

    rows: Tensor
    index: tuple[Tensor, ...]
    batch_rows: Tensor | None


@dataclass(frozen=True, slots=True)
class _SequenceView:
    """One sequence's tokens `start:end` of the batch, and K [KV, D, context], V [KV, context, D] once gathered."""

    start: int
    end: int
    keys_t: Tensor
    values: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Wave:
    """Sequences whose K and V are gathered together: `gathered` as the cache keeps them, with their scales where it
    has some, `computed` in the dtype of attention."""

    gathers: tuple[tuple[_Rows, Tensor], ...]
    gathered: Tensor
    scales: Tensor | None
    computed: Tensor
    sequences: tuple[_SequenceView, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where this step's K and V go and what each sequence reads; built once, used by every layer."""

    stores: tuple[_Rows, ...]
    scale_stores: tuple[_Rows, ...]
    waves: tuple[_Wave, ...]
    format: KVFormat
    balance: Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int


def plan_attention(
    meta: BatchMetadata, store: PagedStore, num_heads: int, head_dim: int, dtype: torch.dtype
) -> AttentionPlan:
    """Prepare `store_kv` and `attention` for one step; `dtype` is what attention computes in."""
    _, _, _, block_size, num_kv_heads, _ = store.extents[0].shape
    counts = [-(-length // block_size) for length in meta.context_lens_host]
    tables = [row[:count] for row, count in zip(meta.block_tables.tolist(), counts, strict=True)]
    token_bytes = 2 * num_kv_heads * head_dim * 4
    heads = (num_heads, head_dim)
    waves, first, size, query = [], 0, 0, 0
    starts = [query := query + n for n in (0, *meta.query_lens)]
    for i, count in enumerate(counts):
        if size and (size + count) * block_size * token_bytes > GATHER_BYTES:
            waves.append(_plan_wave(meta, store, range(first, i), tables, starts, heads, dtype))
            first, size = i, 0
        size += count
    waves.append(_plan_wave(meta, store, range(first, len(counts)), tables, starts, heads, dtype))
    return AttentionPlan(
        stores=_plan_stores(meta.slot_mapping, store.extents, store.blocks_per_extent),
        scale_stores=_plan_stores(meta.slot_mapping, store.scale_extents, store.blocks_per_extent),
        waves=tuple(waves),
        format=KV_FORMATS[store.kv_format],
        balance=store.balance,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def _layer_indices(base: Tensor, step: int, num_layers: int) -> tuple[Tensor, ...]:
    offsets = torch.arange(0, step * num_layers, step, device=base.device)
    return (base + offsets[:, None]).unbind(0)


def _as_rows(extent: Tensor, width: int) -> Tensor:
    """[rows, width]; numbers of one byte as uint8, because torch does not index all of them."""
    return (extent.view(torch.uint8) if extent.itemsize == 1 else extent).view(-1, width)


def _plan_stores(slots: Tensor, extents: Sequence[Tensor], per_extent: int) -> tuple[_Rows, ...]:
    """Rows [blocks * layers * kinds * block_size, KV * width] of each token, its kinds (K, V or scales) in a row."""
    if not extents:
        return ()
    _, num_layers, kinds, block_size, num_kv_heads, width = extents[0].shape
    blocks = slots // block_size
    owners = blocks // per_extent
    used = owners.unique().tolist() if len(extents) > 1 else [0]
    stores = []
    for extent in used:
        chosen = (owners == extent).nonzero().view(-1) if len(used) > 1 else None
        local, own_slots = (blocks, slots) if chosen is None else (blocks[chosen], slots[chosen])
        local = local - extent * per_extent
        base = local * (kinds * num_layers * block_size) + own_slots % block_size
        each = torch.stack([base + kind * block_size for kind in range(kinds)], dim=-1).view(-1)
        rows = _as_rows(extents[extent], num_kv_heads * width)
        stores.append(_Rows(rows, _layer_indices(each, kinds * block_size, num_layers), chosen))
    return tuple(stores)


def _plan_wave(
    meta: BatchMetadata,
    store: PagedStore,
    members: range,
    tables: list[list[int]],
    starts: list[int],
    heads: tuple[int, int],
    dtype: torch.dtype,
) -> _Wave:
    extent = store.extents[0]
    (num_heads, head_dim), (_, _, _, block_size, num_kv_heads, _) = heads, extent.shape
    blocks = [block for i in members for block in tables[i]]

    def gathered(name: str, extents: Sequence[Tensor]) -> Tensor:
        """A place [kinds, tokens, KV, width] for the members' blocks."""
        kinds, width = extents[0].shape[2], extents[0].shape[-1]
        return store.workspace(name, (kinds, len(blocks) * block_size, num_kv_heads, width), extents[0].dtype)

    data = gathered("gathered", store.extents)
    gathers = _plan_gathers(blocks, store.extents, store.blocks_per_extent, data)
    scales = None
    if store.scale_extents:
        scales = gathered("scales", store.scale_extents)
        gathers += _plan_gathers(blocks, store.scale_extents, store.blocks_per_extent, scales)
    computed = data
    if extent.dtype != dtype:
        computed = store.workspace("computed", (2, len(blocks) * block_size, num_kv_heads, head_dim), dtype)
    keys, values = computed.transpose(1, 2)
    sequences, offset = [], 0
    for i in members:
        context = meta.context_lens_host[i]
        span = slice(offset, offset + context)
        mask = _causal_mask(meta.query_lens[i], context, num_heads // num_kv_heads, dtype, extent.device)
        sequences.append(_SequenceView(starts[i], starts[i + 1], keys[:, span].transpose(1, 2), values[:, span], mask))
        offset += len(tables[i]) * block_size
    return _Wave(gathers, data, scales, computed, tuple(sequences))


def _plan_gathers(
    blocks: list[int], extents: Sequence[Tensor], per_extent: int, gathered: Tensor
) -> tuple[tuple[_Rows, Tensor], ...]:
    """One gather for all kinds together where all blocks lie in one extent, else one per kind and run of blocks in an
    extent."""
    _, num_layers, kinds, *block = extents[0].shape
    width, device = math.prod(block), gathered.device
    place = _as_rows(gathered, width).view(kinds, len(blocks), width)
    gathers: list[tuple[_Rows, Tensor]] = []

    def add(extent: int, ids: list[int], which: Sequence[int], out: Tensor) -> None:
        base = torch.tensor(ids, device=device) % per_extent * (kinds * num_layers)
        index = torch.cat([base + kind for kind in which])
        rows = _as_rows(extents[extent], width)
        gathers.append((_Rows(rows, _layer_indices(index, kinds, num_layers), None), out))

    owners = [block_id // per_extent for block_id in blocks]
    if len(set(owners)) == 1:
        add(owners[0], blocks, range(kinds), place.view(-1, width))
        return tuple(gathers)
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or owners[end] != owners[start]:
            for kind in range(kinds):
                add(owners[start], blocks[start:end], (kind,), place[kind, start:end])
            start = end
    return tuple(gathers)


def _causal_mask(queries: int, context: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive [groups * queries, context]: the last query sees all, each one before it a position less."""
    if queries == 1:
        return None
    mask = torch.full((queries, context), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(context - queries + 1).repeat(groups, 1)


def store_kv(plan: AttentionPlan, layer: int, kv: Tensor) -> None:
    """Write kv [T, 2 * KV, D] (all K heads, then all V heads of a token) into the tokens' slots of one layer."""
    kinds = kv.view(kv.shape[0], 2, plan.num_kv_heads, -1)
    if plan.balance is not None:
        kinds = torch.stack((kinds[:, 0] / plan.balance[layer].to(kv.dtype), kinds[:, 1]), 1)
    if plan.format.bits >= 16:
        _scatter(plan.stores, layer, kinds)
        return
    data, scales = encode(plan.format, kinds.transpose(0, 1))
    _scatter(plan.stores, layer, data.transpose(0, 1))
    if scales is not None:
        _scatter(plan.scale_stores, layer, scales.transpose(0, 1))


def _scatter(stores: tuple[_Rows, ...], layer: int, values: Tensor) -> None:
    """values [T, kinds, KV, width] into the tokens' rows."""
    for target in stores:
        chosen = values if target.batch_rows is None else values[target.batch_rows]
        rows = _as_rows(chosen.contiguous(), target.rows.shape[1])
        target.rows.index_copy_(0, target.index[layer], rows.to(target.rows.dtype))


def attention(plan: AttentionPlan, layer: int, q: Tensor, scale: float) -> Tensor:
    """q [T, H, D] over the cached K and V of each token's sequence at positions up to its own -> [T, H * D].

    Slots past a sequence's context and blocks of others are never part of a sum: they may hold anything, NaN too.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.balance is not None:
        q = q * plan.balance[layer].repeat_interleave(plan.num_heads // plan.num_kv_heads, 0).to(q.dtype)
    for wave in plan.waves:
        for source, target in wave.gathers:
            torch.index_select(source.rows, 0, source.index[layer], out=target)
        if wave.computed is not wave.gathered:
            values = wave.gathered if wave.scales is None else decode(plan.format, wave.gathered, wave.scales)
            wave.computed.copy_(values)
        for seq in wave.sequences:
            if seq.mask is None:
                _decode(plan, seq, q, out, scale)
            else:
                _prefill(plan, seq, q, out, scale)
    return out.view(q.shape[0], -1)


def _decode(plan: AttentionPlan, seq: _SequenceView, q: Tensor, out: Tensor, scale: float) -> None:
    shape = (plan.num_kv_heads, -1, plan.head_dim)
    query = q[seq.start].view(shape)
    scores = torch.baddbmm(query.new_empty(1), query, seq.keys_t, beta=0, alpha=scale)
    torch.bmm(scores.softmax(-1), seq.values, out=out[seq.start].view(shape))


def _prefill(plan: AttentionPlan, seq: _SequenceView, q: Tensor, out: Tensor, scale: float) -> None:
    """The query heads of a KV head stand as rows of one matrix, so K and V are never repeated."""
    count, groups = seq.end - seq.start, plan.num_heads // plan.num_kv_heads
    shape = (plan.num_kv_heads, groups, count, plan.head_dim)
    query = q[seq.start : seq.end].transpose(0, 1).reshape(1, plan.num_kv_heads, groups * count, plan.head_dim)
    keys = seq.keys_t.transpose(1, 2)[None]
    result = F.scaled_dot_product_attention(query, keys, seq.values[None], seq.mask, scale=scale)
    out[seq.start : seq.end].view(count, plan.num_kv_heads, groups, -1).copy_(result.view(shape).permute(2, 0, 1, 3))
