"""Rotary embedding, storing of K and V, and attention over the paged cache, for `decode`."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import kv_ir as kv_ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.product import draw, finish


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
    return angle + (group + 1) * ir.word(step, rec.TILED) * ir.word(ir.word(step, rec.MODEL), rec.DIM) * 4


@compiled("int64(int64, int64)")
def _place(step: int, layer: int) -> int:
    return ir.word(step, rec.PLACES) + layer * rec.PLACE_WORDS * 8


@compiled("int64(int64, int64)")
def _group(step: int, layer: int) -> int:
    return ir.word(step, rec.GROUPS) + ir.word(_place(step, layer), rec.GROUP) * rec.GROUP_WORDS * 8


@compiled("int64(int64, int64)")
def _recent(group: int, position: int) -> int:
    """The first position that is in the window of a query at `position`."""
    return max(position - ir.word(group, rec.WINDOW) + 1, 0)


@compiled("int64(int64, int64)")
def _visible(group: int, position: int) -> int:
    """How many keys a query at `position` sees: they are counted without the gap between sinks and window."""
    recent = _recent(group, position)
    return min(ir.word(group, rec.SINKS), recent) + position + 1 - recent


@compiled("void(int64, int64)")
def angles(step: int, out: int) -> None:
    """cos, then sin, [TOKENS, 2, dim / 2] of all positions; behind them [TILED, ...] of what each group takes them for
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


@compiled("int64(int64)")
def _plane(step: int) -> int:
    """Bytes of the keys of one layer in a block."""
    return (
        ir.word(step, rec.BLOCK_SIZE) * ir.word(ir.word(step, rec.MODEL), rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    )


@compiled("int64(int64, int64, int64, int64, int64)")
def _key_place(step: int, store_index: int, kv_head: int, block: int, offset: int) -> int:
    model, per_extent = ir.word(step, rec.MODEL), ir.word(step, rec.EXTENT_BLOCKS)
    extent = ir.word(ir.word(step, rec.EXTENTS), block // per_extent)
    index = (block % per_extent) * ir.word(step, rec.STORES) + store_index
    row = offset * ir.word(model, rec.KV_HEADS) + kv_head
    return extent + index * 2 * _plane(step) + row * ir.word(step, rec.HEAD_BYTES)


@compiled("int64(int64, int64, int64, int64, int64, int64)")
def _scale_place(step: int, store_index: int, plane: int, kv_head: int, block: int, offset: int) -> int:
    """Of the scales of a row; formats with one plane have one scale for K and V."""
    model, per_extent, planes = (
        ir.word(step, rec.MODEL),
        ir.word(step, rec.EXTENT_BLOCKS),
        ir.word(step, rec.SCALE_PLANES),
    )
    extent = ir.word(ir.word(step, rec.SCALE_EXTENTS), block // per_extent)
    index = ((block % per_extent) * ir.word(step, rec.STORES) + store_index) * planes + min(plane, planes - 1)
    row = (index * ir.word(step, rec.BLOCK_SIZE) + offset) * ir.word(model, rec.KV_HEADS) + kv_head
    return extent + row * ir.word(step, rec.SCALE_BYTES)


@compiled("void(int64, int64, int64, int64, int64, int64, int64)")
def _save(step: int, store_index: int, kv: int, block: int, offset: int, key: int, value: int) -> None:
    """One head's K and V, float32, into a slot."""
    kind, dim = ir.word(step, rec.KV_KIND), ir.word(ir.word(step, rec.MODEL), rec.DIM)
    place = _key_place(step, store_index, kv, block, offset)
    below = place + _plane(step)
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
        kv_ir.pack_int8(place, below, _scale_place(step, store_index, 0, kv, block, offset), key, value, dim)
    else:
        kv_ir.pack_int4(place, _scale_place(step, store_index, 0, kv, block, offset), key, dim)
        kv_ir.pack_int4(below, _scale_place(step, store_index, 1, kv, block, offset), value, dim)


@compiled("void(int64, int64, int64)")
def _scale(head: int, dim: int, factors: int) -> None:
    if factors:
        for i in range(dim):
            ir.put(head, i, ir.get(head, i) * ir.get(factors, i))


@by_address(5)
def store(sync: int, phase: int, step: int, layer: int, angle: int) -> int:
    """Turn queries and keys in place in QKV, and queries once more into SINK_Q where the group has sinks; put keys and
    values into the cache if the layer is the first at its place. As far as tickets go."""
    model, own, group = ir.word(step, rec.MODEL), _place(step, layer), _group(step, layer)
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


@compiled("void(int64, int64, int64, int64, int64, int64, int64, float32)")
def _scores(kind: int, out: int, q: int, keys: int, count: int, stride: int, dim: int, scale: float) -> None:
    if kind == kv_ir.FP32:
        kv_ir.scores_fp32(out, q, keys, count, stride, dim, scale)
    elif kind == kv_ir.FP16:
        kv_ir.scores_fp16(out, q, keys, count, stride, dim, scale)
    else:
        kv_ir.scores_bf16(out, q, keys, count, stride, dim, scale)


@compiled("void(int64, int64, int64, int64, int64, int64, int64)")
def _accumulate(kind: int, out: int, weights: int, values: int, count: int, stride: int, dim: int) -> None:
    if kind == kv_ir.FP32:
        kv_ir.accumulate_fp32(out, weights, values, count, stride, dim)
    elif kind == kv_ir.FP16:
        kv_ir.accumulate_fp16(out, weights, values, count, stride, dim)
    else:
        kv_ir.accumulate_bf16(out, weights, values, count, stride, dim)


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _unpack(step: int, store_index: int, plane: int, kv: int, block: int, offset: int, count: int, out: int) -> None:
    """`count` rows of a block in fewer than 16 bits as float32, one after the other; plane 0 is K, 1 is V."""
    model, kind = ir.word(step, rec.MODEL), ir.word(step, rec.KV_KIND)
    dim, stride = ir.word(model, rec.DIM), ir.word(model, rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    row = _key_place(step, store_index, kv, block, offset) + plane * _plane(step)
    for i in range(count):
        if kind == kv_ir.FP8:
            kv_ir.unpack_fp8(out, row, 0, dim)
        elif kind == kv_ir.INT8:
            kv_ir.unpack_int8(out, row, _scale_place(step, store_index, plane, kv, block, offset + i), dim)
        else:
            kv_ir.unpack_int4(out, row, _scale_place(step, store_index, plane, kv, block, offset + i), dim)
        row += stride
        out += dim * 4


@compiled("void(int64, int64, int64)")
def _soften(line: int, count: int, part: int) -> None:
    """Scores into exp(score - largest), padded to 8; largest and their sum into part[0], part[1]."""
    largest = np.float32(-np.inf)
    for i in range(count):
        largest = max(largest, ir.get(line, i))
    whole = (count + 7) // 8 * 8
    for i in range(count, whole):
        ir.put(line, i, np.float32(-np.inf))
    ir.put(part, 0, largest)
    ir.put(part, 1, ir.exp_sum(line, whole, largest))


@by_address(7)
def attend(step: int, layer: int, t: int, kv: int, start: int, end: int, scores: int) -> int:
    """Visible keys start:end of one KV head, for the query heads that share it; each block is read once for all.

    Keys beyond the window are sinks, which have queries of their own."""
    model, kind, block_size = ir.word(step, rec.MODEL), ir.word(step, rec.KV_KIND), ir.word(step, rec.BLOCK_SIZE)
    dim, splits, heads = ir.word(model, rec.DIM), ir.word(step, rec.SPLITS), ir.word(model, rec.HEADS)
    each, group = heads // ir.word(model, rec.KV_HEADS), _group(step, layer)
    store_index = ir.word(_place(step, layer), rec.STORE_INDEX)
        heads // ir.word(model, rec.KV_HEADS),
        _group(step, layer),
        ir.word(_place(step, layer), rec.STORE_INDEX),
    )
    table = ir.word(group, rec.TABLES) + ir.word(ir.word(step, rec.SEQUENCES), t) * ir.word(group, rec.TABLE_WIDTH) * 4
    recent = _recent(group, ir.word(ir.word(step, rec.POSITIONS), t))
    kept = min(ir.word(group, rec.SINKS), recent)
    near = ir.word(step, rec.QKV) + (t * ir.word(step, rec.QKV_WIDTH) + kv * each * dim) * 4
    far = ir.word(step, rec.SINK_Q) + (t * heads + kv * each) * dim * 4
    part_bytes = splits * (dim + 2) * 4
    part = ir.word(step, rec.PARTS) + (t * heads + kv * each) * part_bytes + (start // rec.SPLIT) * (dim + 2) * 4
    scale = ir.get(ir.word(model, rec.SCALARS), 2)
    unpacked, packed = scores + each * rec.SPLIT * 4, kind > kv_ir.BF16
    most = rec.UNPACKED_ROWS if packed else block_size
    stride = dim * 4 if packed else ir.word(model, rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    read = kv_ir.FP32 if packed else kind
    for values in range(2):
        index = start
        while index < end:
            position, stop, query = index - kept + recent, end, near
            if index < kept:
                position, stop, query = index, min(end, kept), far
            offset, block = position % block_size, ir.word32(table, position // block_size)
            count = min(block_size - offset, stop - index, most)
            if packed:
                _unpack(step, store_index, values, kv, block, offset, count, unpacked)
                place = unpacked
            else:
                place = _key_place(step, store_index, kv, block, offset) + values * _plane(step)
            for g in range(each):
                line = scores + (g * rec.SPLIT + index - start) * 4
                if values:
                    _accumulate(read, part + g * part_bytes, line, place, count, stride, dim)
                else:
                    _scores(read, line, query + g * dim * 4, place, count, stride, dim, scale)
            index += count
        if values == 0:
            for g in range(each):
                for i in range(dim):
                    ir.put(part + g * part_bytes, i, np.float32(0.0))
                _soften(scores + g * rec.SPLIT * 4, end - start, part + g * part_bytes + dim * 4)
    return 0


@by_address(5)
def attention(sync: int, phase: int, step: int, layer: int, scores: int) -> int:
    """Each token over the cached positions that it sees, split by split into PARTS, as far as tickets go."""
    model, splits = ir.word(step, rec.MODEL), ir.word(step, rec.SPLITS)
    kv_heads, functions = ir.word(model, rec.KV_HEADS), ir.word(model, rec.FUNCTIONS)
    total = ir.word(step, rec.TOKENS) * kv_heads * splits
    task = draw(sync, phase)
    while task < total:
        t, kv, split = task // (kv_heads * splits), task // splits % kv_heads, task % splits
        visible = _visible(_group(step, layer), ir.word(ir.word(step, rec.POSITIONS), t))
        if split * rec.SPLIT < visible:
            start, end = split * rec.SPLIT, min((split + 1) * rec.SPLIT, visible)
            ir.call_7(ir.word(functions, rec.ATTEND), step, layer, t, kv, start, end, scores)
        finish(sync, phase)
        task = draw(sync, phase)
    return total


@by_address(3)
def combine(step: int, layer: int, out: int) -> int:
    """The splits of each head, weighted, into out [TILED, heads padded], zeros elsewhere."""
    model = ir.word(step, rec.MODEL)
    for i in range(ir.word(step, rec.TILED) * ir.word(model, rec.HEADS_PADDED)):
        ir.put(out, i, np.float32(0.0))
    heads, dim = ir.word(model, rec.HEADS), ir.word(model, rec.DIM)
    for t in range(ir.word(step, rec.TOKENS)):
        splits = (_visible(_group(step, layer), ir.word(ir.word(step, rec.POSITIONS), t)) - 1) // rec.SPLIT + 1
        for head in range(heads):
            part = ir.word(step, rec.PARTS) + (t * heads + head) * ir.word(step, rec.SPLITS) * (dim + 2) * 4
            line = out + (t * ir.word(model, rec.HEADS_PADDED) + head * dim) * 4
            largest, total = np.float32(-np.inf), np.float32(0.0)
            for split in range(splits):
                largest = max(largest, ir.get(part, split * (dim + 2) + dim))
            for i in range(dim):
                ir.put(line, i, np.float32(0.0))
            for split in range(splits):
                own = part + split * (dim + 2) * 4
                weight = np.float32(math.exp(ir.get(own, dim) - largest))
                total += weight * ir.get(own, dim + 1)
                for i in range(dim):
                    ir.put(line, i, ir.get(line, i) + weight * ir.get(own, i))
            for i in range(dim):
                ir.put(line, i, ir.get(line, i) / total)
    return 0
