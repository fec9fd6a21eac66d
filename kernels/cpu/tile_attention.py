"""Attention of several tokens of one sequence at once: keys and values are widened once for all their queries."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import kv_ir, tile_ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.places import key_place, layer_group, layer_place, plane_bytes, recent_start, scale_place

_MINUS_INFINITY = np.float32(-np.inf)


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def widen(
    step: int, store_index: int, plane: int, kv: int, block: int, offset: int, count: int, out: int, gap: int
) -> None:
    """`count` rows of a block as float32, `gap` bytes apart; plane 0 is K, 1 is V."""
    model, kind = ir.word(step, rec.MODEL), ir.word(step, rec.KV_KIND)
    dim, stride = ir.word(model, rec.DIM), ir.word(model, rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    row = key_place(step, store_index, kv, block, offset) + plane * plane_bytes(step)
    for i in range(count):
        scale = 0
        if kind == kv_ir.INT8 or kind == kv_ir.INT4:
            scale = scale_place(step, store_index, plane, kv, block, offset + i)
        if kind == kv_ir.FP32:
            kv_ir.widen_fp32(out, row, scale, dim)
        elif kind == kv_ir.FP16:
            kv_ir.widen_fp16(out, row, scale, dim)
        elif kind == kv_ir.BF16:
            kv_ir.widen_bf16(out, row, scale, dim)
        elif kind == kv_ir.FP8:
            kv_ir.unpack_fp8(out, row, scale, dim)
        elif kind == kv_ir.INT8:
            kv_ir.unpack_int8(out, row, scale, dim)
        else:
            kv_ir.unpack_int4(out, row, scale, dim)
        row += stride
        out += gap


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _gather(step: int, layer: int, t: int, plane: int, kv: int, first: int, count: int, out: int, gap: int) -> None:
    """K or V of positions first:first + count of the sequence of token `t`."""
    group, block_size = layer_group(step, layer), ir.word(step, rec.BLOCK_SIZE)
    store_index = ir.word(layer_place(step, layer), rec.STORE_INDEX)
    table = ir.word(group, rec.TABLES) + ir.word(ir.word(step, rec.SEQUENCES), t) * ir.word(group, rec.TABLE_WIDTH) * 4
    done = 0
    while done < count:
        block, offset = ir.word32(table, (first + done) // block_size), (first + done) % block_size
        run = min(block_size - offset, count - done)
        widen(step, store_index, plane, kv, block, offset, run, out + done * gap, gap)
        done += run


@compiled("void(int64, int64, int64, int64, int64, int64)")
def _hide(step: int, group: int, line: int, t: int, first: int, count: int) -> None:
    """Scores of positions first:first + count that token `t` does not see."""
    position = ir.word(ir.word(step, rec.POSITIONS), t)
    for i in range(max(position + 1 - first, 0), count):
        ir.put(line, i, _MINUS_INFINITY)
    for i in range(min(recent_start(group, position) - first, count)):
        ir.put(line, i, _MINUS_INFINITY)


@compiled("void(int64, int64, int64, int64, int64)")
def _soften(line: int, count: int, state: int, out: int, width: int) -> None:
    """Scores [count] into weights; largest score and sum of weights, in `state`, and the row of `out` follow."""
    before = ir.get(state, 0)
    largest = max(before, tile_ir.largest(line, count))
    if largest == _MINUS_INFINITY:
        for i in range(count):
            ir.put(line, i, np.float32(0.0))
        return
    if largest > before:
        shrink = np.float32(math.exp(before - largest))
        tile_ir.scale(out, width, shrink)
        ir.put(state, 0, largest)
        ir.put(state, 1, ir.get(state, 1) * shrink)
    ir.put(state, 1, ir.get(state, 1) + ir.exp_sum(line, count, largest))


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _begin(step: int, first: int, rows: int, kv: int, queries: int, out: int, states: int, gap: int) -> None:
    """Scaled queries, in rows `gap` bytes apart and zeros behind the last; sums of nothing so far."""
    model = ir.word(step, rec.MODEL)
    heads, dim, scale = ir.word(model, rec.HEADS), ir.word(model, rec.DIM), ir.get(ir.word(model, rec.SCALARS), 2)
    each = heads // ir.word(model, rec.KV_HEADS)
    for r in range((rows + tile_ir.ROWS - 1) // tile_ir.ROWS * tile_ir.ROWS):
        source = ir.word(step, rec.QKV) + (first + r // each) * ir.word(step, rec.QKV_WIDTH) * 4
        source += (kv * each + r % each) * dim * 4
        for i in range(dim):
            ir.put(queries + r * gap, i, ir.get(source, i) * scale if r < rows else np.float32(0.0))
        for i in range(gap // 4 - rec.PAD):
            ir.put(out + r * gap, i, np.float32(0.0))
        ir.put(states + r * 8, 0, _MINUS_INFINITY)
        ir.put(states + r * 8, 1, np.float32(0.0))


@compiled("void(int64, int64, int64, int64, int64, int64, int64)")
def _end(step: int, first: int, rows: int, kv: int, out: int, states: int, gap: int) -> None:
    model = ir.word(step, rec.MODEL)
    heads, dim = ir.word(model, rec.HEADS), ir.word(model, rec.DIM)
    each = heads // ir.word(model, rec.KV_HEADS)
    for r in range(rows):
        target = ir.word(step, rec.ATTENDED_OUT) + ((first + r // each) * heads + kv * each + r % each) * dim * 4
        for i in range(dim):
            ir.put(target, i, ir.get(out + r * gap, i) / ir.get(states + r * 8, 1))


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _multiply(
    rows: int, a: int, a_gap: int, b: int, b_gap: int, out: int, out_gap: int, columns: int, depth: int, add: int
) -> None:
    """out [rows, columns] = add * out + a [rows, depth] · b [depth, columns]; whole tiles, gaps in bytes."""
    for r in range(0, rows, tile_ir.ROWS):
        for i in range(0, columns, tile_ir.COLUMNS):
            target = out + r * out_gap + i * 4
            tile_ir.multiply(a + r * a_gap, a_gap, b + i * 4, b_gap, target, out_gap, depth, add)


@by_address(6)
def attend_tile(step: int, layer: int, first: int, count: int, kv: int, scratch: int) -> int:
    """Tokens first:first + count, of one sequence, over what they see; one KV head.

    Scratch: queries, sums of values, scores, keys on their side, keys or values as rows, largest scores and sums."""
    model, group = ir.word(step, rec.MODEL), layer_group(step, layer)
    each, dim = ir.word(model, rec.HEADS) // ir.word(model, rec.KV_HEADS), ir.word(model, rec.DIM)
    rows, wide = count * each, (dim + 15) // 16 * 16
    tall, gap, key_gap = (rows + 5) // 6 * 6, (wide + rec.PAD) * 4, (rec.TILE_KEYS + rec.PAD) * 4
    out = scratch + tall * gap
    scores = out + tall * gap
    turned = scores + tall * key_gap
    values = turned + wide * key_gap
    states = values + rec.TILE_KEYS * gap
    _begin(step, first, rows, kv, scratch, out, states, gap)
    positions = ir.word(step, rec.POSITIONS)
    start, end = recent_start(group, ir.word(positions, first)), ir.word(positions, first + count - 1) + 1
    all_from, all_to = recent_start(group, end - 1), ir.word(positions, first) + 1
    for key in range(start, end, rec.TILE_KEYS):
        found = min(rec.TILE_KEYS, end - key)
        columns = (found + 15) // 16 * 16
        _gather(step, layer, first, 0, kv, key, found, values, gap)
        for i in range(0, columns, 8):
            tile_ir.transpose(values + i * gap, gap, dim, turned + i * 4, key_gap)
        _multiply(tall, scratch, gap, turned, key_gap, scores, key_gap, columns, dim, 0)
        for r in range(rows):
            line = scores + r * key_gap
            if key < all_from or key + columns > all_to:
                _hide(step, group, line, first + r // each, key, columns)
            _soften(line, columns, states + r * 8, out + r * gap, wide)
        _gather(step, layer, first, 1, kv, key, found, values, gap)
        _multiply(tall, scores, key_gap, values, gap, out, gap, wide, found, 1)
    _end(step, first, rows, kv, out, states, gap)
    return 0
