"""Attention over the paged cache, for `decode`."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import kv_ir as kv_ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.places import key_place, layer_group, layer_place, plane_bytes, recent_start, scale_place, visible_keys
from kernels.cpu.product import draw, finish


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
    row = key_place(step, store_index, kv, block, offset) + plane * plane_bytes(step)
    for i in range(count):
        if kind == kv_ir.FP8:
            kv_ir.unpack_fp8(out, row, 0, dim)
        elif kind == kv_ir.INT8:
            kv_ir.unpack_int8(out, row, scale_place(step, store_index, plane, kv, block, offset + i), dim)
        else:
            kv_ir.unpack_int4(out, row, scale_place(step, store_index, plane, kv, block, offset + i), dim)
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
    each, group = heads // ir.word(model, rec.KV_HEADS), layer_group(step, layer)
    store_index = ir.word(layer_place(step, layer), rec.STORE_INDEX)
    table = ir.word(group, rec.TABLES) + ir.word(ir.word(step, rec.SEQUENCES), t) * ir.word(group, rec.TABLE_WIDTH) * 4
    recent = recent_start(group, ir.word(ir.word(step, rec.POSITIONS), t))
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
                place = key_place(step, store_index, kv, block, offset) + values * plane_bytes(step)
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
        visible = visible_keys(layer_group(step, layer), ir.word(ir.word(step, rec.POSITIONS), t))
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
        splits = (visible_keys(layer_group(step, layer), ir.word(ir.word(step, rec.POSITIONS), t)) - 1) // rec.SPLIT + 1
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
