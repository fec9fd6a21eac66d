"""Rotary embedding, storing of K and V, and attention over the paged cache, for `decode`."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import kv_ir as kv_ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.product import draw, finish


@compiled("void(int64, int64)")
def angles(step: int, out: int) -> None:
    """cos, then sin, [TOKENS, 2, dim / 2]."""
    model = ir.word(step, rec.MODEL)
    half, scale = ir.word(model, rec.DIM) // 2, ir.get(ir.word(model, rec.SCALARS), 1)
    for t in range(ir.word(step, rec.TOKENS)):
        position = np.float32(ir.word(ir.word(step, rec.POSITIONS), t))
        for i in range(half):
            angle = position * ir.get(ir.word(model, rec.INV_FREQ), i)
            ir.put(out, 2 * t * half + i, math.cos(angle) * scale)
            ir.put(out, (2 * t + 1) * half + i, math.sin(angle) * scale)


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
def _key_place(step: int, layer: int, kv_head: int, block: int, offset: int) -> int:
    model, per_extent = ir.word(step, rec.MODEL), ir.word(step, rec.EXTENT_BLOCKS)
    extent = ir.word(ir.word(step, rec.EXTENTS), block // per_extent)
    index = (block % per_extent) * ir.word(model, rec.LAYERS) + layer
    row = offset * ir.word(model, rec.KV_HEADS) + kv_head
    return extent + index * 2 * _plane(step) + row * ir.word(step, rec.HEAD_BYTES)


@compiled("int64(int64, int64, int64, int64, int64, int64)")
def _scale_place(step: int, layer: int, plane: int, kv_head: int, block: int, offset: int) -> int:
    """Of the scales of a row; formats with one plane have one scale for K and V."""
    model, per_extent, planes = (
        ir.word(step, rec.MODEL),
        ir.word(step, rec.EXTENT_BLOCKS),
        ir.word(step, rec.SCALE_PLANES),
    )
    extent = ir.word(ir.word(step, rec.SCALE_EXTENTS), block // per_extent)
    index = ((block % per_extent) * ir.word(model, rec.LAYERS) + layer) * planes + min(plane, planes - 1)
    row = (index * ir.word(step, rec.BLOCK_SIZE) + offset) * ir.word(model, rec.KV_HEADS) + kv_head
    return extent + row * ir.word(step, rec.SCALE_BYTES)


@compiled("void(int64, int64, int64, int64, int64, int64, int64)")
def _save(step: int, layer: int, kv: int, block: int, offset: int, key: int, value: int) -> None:
    """One head's K and V, float32, into a slot."""
    kind, dim = ir.word(step, rec.KV_KIND), ir.word(ir.word(step, rec.MODEL), rec.DIM)
    place = _key_place(step, layer, kv, block, offset)
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
        kv_ir.pack_int8(place, below, _scale_place(step, layer, 0, kv, block, offset), key, value, dim)
    else:
        kv_ir.pack_int4(place, _scale_place(step, layer, 0, kv, block, offset), key, dim)
        kv_ir.pack_int4(below, _scale_place(step, layer, 1, kv, block, offset), value, dim)


@by_address(5)
def store(sync: int, phase: int, step: int, layer: int, angle: int) -> int:
    """Turn queries and keys in place in QKV, put keys and values into the cache, as far as tickets go."""
    model = ir.word(step, rec.MODEL)
    record = ir.word(model, rec.LAYER_RECORDS) + layer * rec.LAYER_WORDS * 8
    heads, kv_heads, dim = ir.word(model, rec.HEADS), ir.word(model, rec.KV_HEADS), ir.word(model, rec.DIM)
    block_size, balance = ir.word(step, rec.BLOCK_SIZE), ir.word(step, rec.BALANCE)
    eps = ir.get(ir.word(model, rec.SCALARS), 0)
    group, total = heads // kv_heads, ir.word(step, rec.TOKENS) * kv_heads
    task = draw(sync, phase)
    while task < total:
        t, kv = task // kv_heads, task % kv_heads
        row, turned = ir.word(step, rec.QKV) + t * ir.word(step, rec.QKV_WIDTH) * 4, angle + t * dim * 4
        for head in range(kv * group, (kv + 1) * group):
            _turn(row + head * dim * 4, dim // 2, ir.word(record, rec.Q_NORM), eps, turned)
        key = row + (heads + kv) * dim * 4
        _turn(key, dim // 2, ir.word(record, rec.K_NORM), eps, turned)
        if balance:
            factors = balance + (layer * kv_heads + kv) * dim * 4
            for i in range(dim):
                ir.put(key, i, ir.get(key, i) / ir.get(factors, i))
            for head in range(kv * group, (kv + 1) * group):
                for i in range(dim):
                    ir.put(row + head * dim * 4, i, ir.get(row + head * dim * 4, i) * ir.get(factors, i))
        slot = ir.word(ir.word(step, rec.SLOTS), t)
        _save(step, layer, kv, slot // block_size, slot % block_size, key, key + kv_heads * dim * 4)
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
def _unpack(step: int, layer: int, plane: int, kv: int, block: int, offset: int, count: int, out: int) -> None:
    """`count` rows of a block in fewer than 16 bits as float32, one after the other; plane 0 is K, 1 is V."""
    model, kind = ir.word(step, rec.MODEL), ir.word(step, rec.KV_KIND)
    dim, stride = ir.word(model, rec.DIM), ir.word(model, rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    row = _key_place(step, layer, kv, block, offset) + plane * _plane(step)
    for i in range(count):
        if kind == kv_ir.FP8:
            kv_ir.unpack_fp8(out, row, 0, dim)
        elif kind == kv_ir.INT8:
            kv_ir.unpack_int8(out, row, _scale_place(step, layer, plane, kv, block, offset + i), dim)
        else:
            kv_ir.unpack_int4(out, row, _scale_place(step, layer, plane, kv, block, offset + i), dim)
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
    """Positions start:end of one KV head, for the query heads that share it; each block is read once for all."""
    model, kind, block_size = ir.word(step, rec.MODEL), ir.word(step, rec.KV_KIND), ir.word(step, rec.BLOCK_SIZE)
    dim, splits, heads = ir.word(model, rec.DIM), ir.word(step, rec.SPLITS), ir.word(model, rec.HEADS)
    group = heads // ir.word(model, rec.KV_HEADS)
    table = ir.word(step, rec.TABLES) + ir.word(ir.word(step, rec.SEQUENCES), t) * ir.word(step, rec.TABLE_WIDTH) * 4
    query = ir.word(step, rec.QKV) + (t * ir.word(step, rec.QKV_WIDTH) + kv * group * dim) * 4
    part_bytes = splits * (dim + 2) * 4
    part = ir.word(step, rec.PARTS) + (t * heads + kv * group) * part_bytes + (start // rec.SPLIT) * (dim + 2) * 4
    scale = np.float32(1.0) / np.float32(math.sqrt(np.float32(dim)))
    unpacked, packed = scores + group * rec.SPLIT * 4, kind > kv_ir.BF16
    most = rec.UNPACKED_ROWS if packed else block_size
    stride = dim * 4 if packed else ir.word(model, rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    read = kv_ir.FP32 if packed else kind
    for values in range(2):
        position = start
        while position < end:
            offset, block = position % block_size, ir.word32(table, position // block_size)
            count = min(block_size - offset, end - position, most)
            if packed:
                _unpack(step, layer, values, kv, block, offset, count, unpacked)
                place = unpacked
            else:
                place = _key_place(step, layer, kv, block, offset) + values * _plane(step)
            for g in range(group):
                line = scores + (g * rec.SPLIT + position - start) * 4
                if values:
                    _accumulate(read, part + g * part_bytes, line, place, count, stride, dim)
                else:
                    _scores(read, line, query + g * dim * 4, place, count, stride, dim, scale)
            position += count
        if values == 0:
            for g in range(group):
                for i in range(dim):
                    ir.put(part + g * part_bytes, i, np.float32(0.0))
                _soften(scores + g * rec.SPLIT * 4, end - start, part + g * part_bytes + dim * 4)
    return 0


@by_address(5)
def attention(sync: int, phase: int, step: int, layer: int, scores: int) -> int:
    """Each token over the cached positions up to its own, split by split into PARTS, as far as tickets go."""
    model, splits = ir.word(step, rec.MODEL), ir.word(step, rec.SPLITS)
    kv_heads, functions = ir.word(model, rec.KV_HEADS), ir.word(model, rec.FUNCTIONS)
    total = ir.word(step, rec.TOKENS) * kv_heads * splits
    task = draw(sync, phase)
    while task < total:
        t, kv, split = task // (kv_heads * splits), task // splits % kv_heads, task % splits
        context = ir.word(ir.word(step, rec.POSITIONS), t) + 1
        if split * rec.SPLIT < context:
            start, end = split * rec.SPLIT, min((split + 1) * rec.SPLIT, context)
            ir.call_7(ir.word(functions, rec.ATTEND), step, layer, t, kv, start, end, scores)
        finish(sync, phase)
        task = draw(sync, phase)
    return total


@by_address(2)
def combine(step: int, out: int) -> int:
    """The splits of each head, weighted, into out [TILED, heads padded], zeros elsewhere."""
    model = ir.word(step, rec.MODEL)
    for i in range(ir.word(step, rec.TILED) * ir.word(model, rec.HEADS_PADDED)):
        ir.put(out, i, np.float32(0.0))
    heads, dim = ir.word(model, rec.HEADS), ir.word(model, rec.DIM)
    for t in range(ir.word(step, rec.TOKENS)):
        splits = ir.word(ir.word(step, rec.POSITIONS), t) // rec.SPLIT + 1
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
