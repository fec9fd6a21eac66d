"""Every operation of the decoder in plain torch: the definition that faster kernels are compared with.

On a CPU this is also what people use, so a decoded token takes few torch calls: index tensors and views are prepared
once per step (`AttentionPlan`) and serve all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import BatchMetadata, PagedStore

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
    """Sequences whose K and V are gathered together. `gathered` has the cache's dtype, `computed` the model's."""

    gathers: tuple[tuple[_Rows, Tensor], ...]
    gathered: Tensor
    computed: Tensor
    sequences: tuple[_SequenceView, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where this step's K and V go and what each sequence reads; built once, used by every layer."""

    stores: tuple[_Rows, ...]
    waves: tuple[_Wave, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int


def plan_attention(meta: BatchMetadata, store: PagedStore, num_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """Prepare `store_kv` and `attention` for one step; `dtype` is what attention computes in."""
    _, _, _, block_size, num_kv_heads, head_dim = store.extents[0].shape
    counts = [-(-length // block_size) for length in meta.context_lens_host]
    tables = [row[:count] for row, count in zip(meta.block_tables.tolist(), counts, strict=True)]
    token_bytes = 2 * num_kv_heads * head_dim * 4
    waves, first, size, query = [], 0, 0, 0
    starts = [query := query + n for n in (0, *meta.query_lens)]
    for i, count in enumerate(counts):
        if size and (size + count) * block_size * token_bytes > GATHER_BYTES:
            waves.append(_plan_wave(meta, store, range(first, i), tables, starts, num_heads, dtype))
            first, size = i, 0
        size += count
    waves.append(_plan_wave(meta, store, range(first, len(counts)), tables, starts, num_heads, dtype))
    return AttentionPlan(_plan_stores(meta.slot_mapping, store), tuple(waves), num_heads, num_kv_heads, head_dim)


def _layer_indices(base: Tensor, step: int, num_layers: int) -> tuple[Tensor, ...]:
    offsets = torch.arange(0, step * num_layers, step, device=base.device)
    return (base + offsets[:, None]).unbind(0)


def _plan_stores(slots: Tensor, store: PagedStore) -> tuple[_Rows, ...]:
    """Rows [blocks * layers * 2 * block_size, KV * D] that take K and V of each token, alternating K, V."""
    _, num_layers, _, block_size, num_kv_heads, head_dim = store.extents[0].shape
    blocks = slots // block_size
    owners = blocks // store.blocks_per_extent
    used = owners.unique().tolist() if len(store.extents) > 1 else [0]
    stores = []
    for extent in used:
        chosen = (owners == extent).nonzero().view(-1) if len(used) > 1 else None
        local, own_slots = (blocks, slots) if chosen is None else (blocks[chosen], slots[chosen])
        local = local - extent * store.blocks_per_extent
        base = local * (2 * num_layers * block_size) + own_slots % block_size
        pair = torch.stack((base, base + block_size), dim=-1).view(-1)
        rows = store.extents[extent].view(-1, num_kv_heads * head_dim)
        stores.append(_Rows(rows, _layer_indices(pair, 2 * block_size, num_layers), chosen))
    return tuple(stores)


def _plan_wave(
    meta: BatchMetadata,
    store: PagedStore,
    members: range,
    tables: list[list[int]],
    starts: list[int],
    num_heads: int,
    dtype: torch.dtype,
) -> _Wave:
    extent = store.extents[0]
    _, num_layers, _, block_size, num_kv_heads, head_dim = extent.shape
    blocks = [block for i in members for block in tables[i]]
    shape = (2, len(blocks), block_size * num_kv_heads * head_dim)
    gathered = store.workspace("gathered", shape, extent.dtype)
    computed = gathered if extent.dtype == dtype else store.workspace("computed", shape, dtype)
    keys, values = computed.view(2, -1, num_kv_heads, head_dim).transpose(1, 2)
    sequences, offset = [], 0
    for i in members:
        context = meta.context_lens_host[i]
        span = slice(offset, offset + context)
        mask = _causal_mask(meta.query_lens[i], context, num_heads // num_kv_heads, dtype, extent.device)
        sequences.append(_SequenceView(starts[i], starts[i + 1], keys[:, span].transpose(1, 2), values[:, span], mask))
        offset += len(tables[i]) * block_size
    return _Wave(_plan_gathers(blocks, store, gathered, num_layers), gathered, computed, tuple(sequences))


def _plan_gathers(
    blocks: list[int], store: PagedStore, gathered: Tensor, num_layers: int
) -> tuple[tuple[_Rows, Tensor], ...]:
    """One gather for K and V together where all blocks lie in one extent, else two per run of blocks in an extent."""
    per_extent, device = store.blocks_per_extent, gathered.device
    gathers: list[tuple[_Rows, Tensor]] = []

    def add(extent: int, ids: list[int], kinds: tuple[int, ...], out: Tensor) -> None:
        base = torch.tensor(ids, device=device) % per_extent * (2 * num_layers)
        index = torch.cat([base + kind for kind in kinds])
        rows = store.extents[extent].view(-1, gathered.shape[-1])
        gathers.append((_Rows(rows, _layer_indices(index, 2, num_layers), None), out))

    owners = [block // per_extent for block in blocks]
    if len(set(owners)) == 1:
        add(owners[0], blocks, (0, 1), gathered.view(-1, gathered.shape[-1]))
        return tuple(gathers)
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or owners[end] != owners[start]:
            for kind in (0, 1):
                add(owners[start], blocks[start:end], (kind,), gathered[kind, start:end])
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
    for target in plan.stores:
        chosen = kv if target.batch_rows is None else kv[target.batch_rows]
        target.rows.index_copy_(0, target.index[layer], chosen.reshape(-1, target.rows.shape[1]).to(target.rows.dtype))


def attention(plan: AttentionPlan, layer: int, q: Tensor, scale: float) -> Tensor:
    """q [T, H, D] over the cached K and V of each token's sequence at positions up to its own -> [T, H * D].

    Slots past a sequence's context and blocks of others are never part of a sum: they may hold anything, NaN too.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for wave in plan.waves:
        for source, target in wave.gathers:
            torch.index_select(source.rows, 0, source.index[layer], out=target)
        if wave.computed is not wave.gathered:
            wave.computed.copy_(wave.gathered)
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
