"""Rotary embedding, and storing of K and V in the paged cache, for `decode`."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import kv_ir as kv_ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.places import key_place, layer_group, layer_place, plane_bytes, scale_place
from kernels.cpu.tickets import draw, finish


@compiled("void(int64, int64, int64)")
def _fill_angles(step: int, largest: int, out: int) -> None:
    model = ir.word(step, rec.MODEL)
    half, scale = ir.word(model, rec.DIM) // 2, ir.get(ir.word(model, rec.SCALARS), 1)
    for t in range(ir.word(step, rec.TOKENS)):
        position = np.float32(min(ir.word(ir.word(step, rec.POSITIONS), t), largest))
        for i in range(half):
            angle = position * ir.get(ir.word(model, rec.INV_FREQ), i)
            ir.put(out, 2 * t * half + i, math.cos(angle) * scale)
            ir.put(out, (2 * t + 1) * half + i, math.sin(angle) * scale)


@compiled("int64(int64, int64, int64)")
def _sink_angles(step: int, angle: int, group: int) -> int:
    return angle + (group + 1) * ir.word(step, rec.TOKENS) * ir.word(ir.word(step, rec.MODEL), rec.DIM) * 4


@compiled("void(int64, int64)")
def angles(step: int, out: int) -> None:
    """cos, then sin, [TOKENS, 2, dim / 2] of all positions; behind them [TOKENS, ...] of what each group takes them for
    where it scores sinks."""
    _fill_angles(step, rec.NO_WINDOW, out)
    for g in range(ir.word(step, rec.GROUP_COUNT)):
        group = ir.word(step, rec.GROUPS) + g * rec.GROUP_WORDS * 8
        sinks = ir.word(group, rec.SINKS)
        if sinks:
            _fill_angles(step, ir.word(group, rec.WINDOW) + sinks - 1, _sink_angles(step, out, g))


@compiled("void(int64, int64, int64, float32, int64)")
def _turn(head: int, half: int, weight: int, eps: float, angle: int) -> None:
    """Norm (where there is a weight) and rotate one head in place."""
    if weight:
        total = np.float32(0.0)
        for i in range(2 * half):
            total += ir.get(head, i) * ir.get(head, i)
        scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(2 * half) + eps))
        for i in range(2 * half):
            ir.put(head, i, ir.get(head, i) * scale * ir.get(weight, i))
    for i in range(half):
        a, b, cos, sin = ir.get(head, i), ir.get(head, half + i), ir.get(angle, i), ir.get(angle, half + i)
        ir.put(head, i, a * cos - b * sin)
        ir.put(head, half + i, b * cos + a * sin)


@compiled("void(int64, int64, int64)")
def _scale(head: int, dim: int, factors: int) -> None:
    if factors:
        for i in range(dim):
            ir.put(head, i, ir.get(head, i) * ir.get(factors, i))


@compiled("void(int64, int64, int64, int64, int64, int64, int64)")
def _save(step: int, store_index: int, kv: int, block: int, offset: int, key: int, value: int) -> None:
    """One head's K and V, float32, into a slot."""
    kind, dim = ir.word(step, rec.KV_KIND), ir.word(ir.word(step, rec.MODEL), rec.DIM)
    place = key_place(step, store_index, kv, block, offset)
    below = place + plane_bytes(step)
    if kind == kv_ir.FP32:
        kv_ir.save_fp32(place, key, dim)
        kv_ir.save_fp32(below, value, dim)
    elif kind == kv_ir.FP16:
        kv_ir.save_fp16(place, key, dim)
        kv_ir.save_fp16(below, value, dim)
    elif kind == kv_ir.BF16:
        kv_ir.save_bf16(place, key, dim)
        kv_ir.save_bf16(below, value, dim)
    elif kind == kv_ir.FP8:
        kv_ir.pack_fp8(place, key, dim)
        kv_ir.pack_fp8(below, value, dim)
    elif kind == kv_ir.INT8:
        kv_ir.pack_int8(place, below, scale_place(step, store_index, 0, kv, block, offset), key, value, dim)
    else:
        kv_ir.pack_int4(place, scale_place(step, store_index, 0, kv, block, offset), key, dim)
        kv_ir.pack_int4(below, scale_place(step, store_index, 1, kv, block, offset), value, dim)


@by_address(5)
def store(sync: int, phase: int, step: int, layer: int, angle: int) -> int:
    """Turn queries and keys in place in QKV, and queries once more into SINK_Q where the group has sinks; put keys and
    values into the cache if the layer is the first at its place. As far as tickets go."""
    model, own, group = ir.word(step, rec.MODEL), layer_place(step, layer), layer_group(step, layer)
    record = ir.word(model, rec.LAYER_RECORDS) + layer * rec.LAYER_WORDS * 8
    heads, kv_heads, dim = ir.word(model, rec.HEADS), ir.word(model, rec.KV_HEADS), ir.word(model, rec.DIM)
    block_size, balance = ir.word(step, rec.BLOCK_SIZE), ir.word(step, rec.BALANCE)
    eps = ir.get(ir.word(model, rec.SCALARS), 0)
    each, total = heads // kv_heads, ir.word(step, rec.TOKENS) * kv_heads
    stores, owner = ir.word(own, rec.OWNER) == layer, ir.word(own, rec.OWNER)
    sink_angle = _sink_angles(step, angle, ir.word(own, rec.GROUP)) if ir.word(group, rec.SINKS) else 0
    task = draw(sync, phase)
    while task < total:
        t, kv = task // kv_heads, task % kv_heads
        row, turned = ir.word(step, rec.QKV) + t * ir.word(step, rec.QKV_WIDTH) * 4, angle + t * dim * 4
        factors = balance + (owner * kv_heads + kv) * dim * 4 if balance else 0
        for head in range(kv * each, (kv + 1) * each):
            query = row + head * dim * 4
            if sink_angle:
                copy = ir.word(step, rec.SINK_Q) + (t * heads + head) * dim * 4
                for i in range(dim):
                    ir.put(copy, i, ir.get(query, i))
                _turn(copy, dim // 2, ir.word(record, rec.Q_NORM), eps, sink_angle + t * dim * 4)
                _scale(copy, dim, factors)
            _turn(query, dim // 2, ir.word(record, rec.Q_NORM), eps, turned)
            _scale(query, dim, factors)
        key = row + (heads + kv) * dim * 4
        _turn(key, dim // 2, ir.word(record, rec.K_NORM), eps, turned)
        if factors:
            for i in range(dim):
                ir.put(key, i, ir.get(key, i) / ir.get(factors, i))
        if stores:
            slot, store_index = ir.word(ir.word(group, rec.SLOTS), t), ir.word(own, rec.STORE_INDEX)
            _save(step, store_index, kv, slot // block_size, slot % block_size, key, key + kv_heads * dim * 4)
        finish(sync, phase)
        task = draw(sync, phase)
    return total
