"""Storing K and V, and attention over the paged cache, layer by layer along a step's plan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.attention_plan import AttentionPlan, SequenceView
from kernels.reference.gathers import Rows, as_rows
from kernels.reference.kv_codes import decode, encode


def store_kv(plan: AttentionPlan, layer: int, kv: Tensor) -> None:
    """Write kv [T, 2 * KV, D] (all K heads, then all V heads of a token) into the tokens' slots of one layer.

    Nothing happens for a layer that is not the first at its place.
    """
    if plan.owners[layer] != layer:
        return
    place, kinds = plan.places[layer], kv.view(kv.shape[0], 2, plan.num_kv_heads, -1)
    group = plan.groups[place.group]
    if plan.balance is not None:
        kinds = torch.stack((kinds[:, 0] / plan.balance[layer].to(kv.dtype), kinds[:, 1]), 1)
    if plan.format.bits >= 16:
        _scatter(group.stores, place.store, kinds)
        return
    data, scales = encode(plan.format, kinds.transpose(0, 1))
    _scatter(group.stores, place.store, data.transpose(0, 1))
    if scales is not None:
        _scatter(group.scale_stores, place.store, scales.transpose(0, 1))


def _scatter(stores: tuple[Rows, ...], store: int, values: Tensor) -> None:
    """values [T, kinds, KV, width] into the tokens' rows."""
    for target in stores:
        chosen = values if target.other_rows is None else values[target.other_rows]
        rows = as_rows(chosen.contiguous(), target.rows.shape[1])
        target.rows.index_copy_(0, target.index[store], rows.to(target.rows.dtype))


def attention(plan: AttentionPlan, layer: int, q: Tensor, scale: float, sink_q: Tensor | None = None) -> Tensor:
    """q [T, H, D] over the cached K and V that each token sees of its sequence -> [T, H * D].

    `sink_q`, like q, scores the sinks beyond the window in its place (`LayerGroup`). What no token sees, slots past a
    context and blocks of others among it, is never part of a sum: it may hold anything, NaN too.
    """
    place, out = plan.places[layer], torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.balance is not None:
        balance = plan.balance[plan.owners[layer]].repeat_interleave(plan.num_heads // plan.num_kv_heads, 0)
        q = q * balance.to(q.dtype)
        sink_q = None if sink_q is None else sink_q * balance.to(q.dtype)
    for wave in plan.groups[place.group].waves:
        for source, target in wave.gathers:
            if source.other_rows is None:
                torch.index_select(source.rows, 0, source.index[place.store], out=target)
            else:
                target.index_copy_(0, source.other_rows, source.rows[source.index[place.store]])
        if wave.computed is not wave.gathered:
            values = wave.gathered if wave.scales is None else decode(plan.format, wave.gathered, wave.scales)
            wave.computed.copy_(values)
        for seq in wave.sequences:
            if seq.mask is None:
                _decode(plan, seq, q, sink_q, out, scale)
            else:
                _prefill(plan, seq, q, sink_q, out, scale)
    return out.view(q.shape[0], -1)


def _decode(
    plan: AttentionPlan, seq: SequenceView, q: Tensor, sink_q: Tensor | None, out: Tensor, scale: float
) -> None:
    shape = (plan.num_kv_heads, -1, plan.head_dim)
    query = q[seq.start].view(shape)
    scores = torch.baddbmm(query.new_empty(1), query, seq.keys_t, beta=0, alpha=scale)
    if sink_q is not None and seq.sinks:
        scores[..., : seq.sinks] = sink_q[seq.start].view(shape) @ seq.keys_t[..., : seq.sinks] * scale
    torch.bmm(scores.softmax(-1), seq.values, out=out[seq.start].view(shape))


def _prefill(
    plan: AttentionPlan, seq: SequenceView, q: Tensor, sink_q: Tensor | None, out: Tensor, scale: float
) -> None:
    """The query heads of a KV head stand as rows of one matrix, so K and V are never repeated."""
    count, heads = seq.end - seq.start, plan.num_heads // plan.num_kv_heads

    def rows(queries: Tensor) -> Tensor:
        return queries[seq.start : seq.end].transpose(0, 1).reshape(plan.num_kv_heads, heads * count, plan.head_dim)

    if sink_q is not None and seq.mask is not None and seq.beyond is not None:
        scores = rows(q) @ seq.keys_t * scale
        of_sinks = rows(sink_q) @ seq.keys_t[..., : seq.sinks] * scale
        scores[..., : seq.sinks] = torch.where(seq.beyond, of_sinks, scores[..., : seq.sinks])
        result = (scores + seq.mask).softmax(-1) @ seq.values
    else:
        keys = seq.keys_t.transpose(1, 2)[None]
        result = F.scaled_dot_product_attention(rows(q)[None], keys, seq.values[None], seq.mask, scale=scale)
    shape = (plan.num_kv_heads, heads, count, plan.head_dim)
    out[seq.start : seq.end].view(count, plan.num_kv_heads, heads, -1).copy_(result.view(shape).permute(2, 0, 1, 3))
