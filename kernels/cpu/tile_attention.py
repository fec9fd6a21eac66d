"""Attention of several tokens of one sequence at once: keys and values are widened once for all their queries."""

from __future__ import annotations

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import kv_ir, tile_ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.places import block_table, key_place, layer_group, layer_place, plane_bytes, recent_start, scale_place
from kernels.cpu.splits import MINUS_INFINITY, begin, join, soften


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _unpack(
    step: int, store_index: int, plane: int, kv: int, block: int, offset: int, count: int, out: int, gap: int, row: int
) -> None:
    """As `widen`, of rows in fewer bits, the first at `row`."""
    model, kind = ir.word(step, rec.MODEL), ir.word(step, rec.KV_KIND)
    dim, stride = ir.word(model, rec.DIM), ir.word(model, rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    for i in range(count):
        scale = 0 if kind == kv_ir.FP8 else scale_place(step, store_index, plane, kv, block, offset + i)
        if kind == kv_ir.FP8:
            kv_ir.unpack_fp8(out, row, scale, dim)
        elif kind == kv_ir.INT8:
            kv_ir.unpack_int8(out, row, scale, dim)
        else:
            kv_ir.unpack_int4(out, row, scale, dim)
        row += stride
        out += gap


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def widen(
    step: int, store_index: int, plane: int, kv: int, block: int, offset: int, count: int, out: int, gap: int
) -> None:
    """`count` rows of a block as float32, `gap` bytes apart; plane 0 is K, 1 is V."""
    model, kind = ir.word(step, rec.MODEL), ir.word(step, rec.KV_KIND)
    dim, stride = ir.word(model, rec.DIM), ir.word(model, rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    row = key_place(step, store_index, kv, block, offset) + plane * plane_bytes(step)
    if kind == kv_ir.FP32:
        kv_ir.widen_fp32(out, gap, row, stride, count, dim)
    elif kind == kv_ir.FP16:
        kv_ir.widen_fp16(out, gap, row, stride, count, dim)
    elif kind == kv_ir.BF16:
        kv_ir.widen_bf16(out, gap, row, stride, count, dim)
    else:
        _unpack(step, store_index, plane, kv, block, offset, count, out, gap, row)


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _gather(step: int, layer: int, t: int, plane: int, kv: int, first: int, count: int, out: int, gap: int) -> None:
    """K or V of positions first:first + count of the sequence of token `t`."""
    block_size, table, done = ir.word(step, rec.BLOCK_SIZE), block_table(step, layer, t), 0
    store_index = ir.word(layer_place(step, layer), rec.STORE_INDEX)
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
        ir.put(line, i, MINUS_INFINITY)
    for i in range(min(recent_start(group, position) - first, count)):
        ir.put(line, i, MINUS_INFINITY)


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _begin(step: int, first: int, rows: int, kv: int, queries: int, out: int, pairs: int, gap: int) -> None:
    """Queries [rows, dim]; rows of `out` `gap` bytes apart, and their pairs, of no split so far."""
    model = ir.word(step, rec.MODEL)
    heads, dim = ir.word(model, rec.HEADS), ir.word(model, rec.DIM)
    each = heads // ir.word(model, rec.KV_HEADS)
    for r in range(rows):
        source = ir.word(step, rec.QKV) + (first + r // each) * ir.word(step, rec.QKV_WIDTH) * 4
        source += (kv * each + r % each) * dim * 4
        for i in range(dim):
            ir.put(queries + r * dim * 4, i, ir.get(source, i))
        begin(out + r * gap, pairs + r * 8, dim)


@compiled("void(int64, int64, int64, int64, int64, int64, int64)")
def _end(step: int, first: int, rows: int, kv: int, out: int, pairs: int, gap: int) -> None:
    model = ir.word(step, rec.MODEL)
    heads, dim = ir.word(model, rec.HEADS), ir.word(model, rec.DIM)
    each = heads // ir.word(model, rec.KV_HEADS)
    for r in range(rows):
        target = ir.word(step, rec.ATTENDED_OUT) + ((first + r // each) * heads + kv * each + r % each) * dim * 4
        tile_ir.scale(out + r * gap, dim, np.float32(1.0) / ir.get(pairs + r * 8, 1))
        for i in range(dim):
            ir.put(target, i, ir.get(out + r * gap, i))


@by_address(8)
def score_tile(step: int, rows: int, queries: int, keys: int, line: int, columns: int, out: int, room: int) -> int:
    """out [rows, columns] = scale * queries [rows, dim] · turned keys [dim, columns], `line` bytes apart; whole tiles.

    A function of its own, as the next one is: inside a large one the sums would not all stay in registers.
    """
    model, out_line = ir.word(step, rec.MODEL), (rec.SPLIT + rec.PAD) * 4
    dim, scale = ir.word(model, rec.DIM), ir.get(ir.word(model, rec.SCALARS), 2)
    for r in range(0, rows, tile_ir.ROWS):
        for i in range(0, columns, tile_ir.COLUMNS):
            own, target = queries + r * dim * 4, out + r * out_line + i * 4
            tile_ir.score(own, dim * 4, keys + i * 4, line, target, out_line, dim, scale, room)
    return 0


@by_address(8)
def add_values(rows: int, weights: int, values: int, out: int, gap: int, columns: int, count: int, add: int) -> int:
    """out [rows, columns] = add * out + weights [rows, count] · values [count, columns]; whole tiles, rows of values
    and out `gap` bytes apart."""
    line = (rec.SPLIT + rec.PAD) * 4
    for r in range(0, rows, tile_ir.ROWS):
        for i in range(0, columns, tile_ir.COLUMNS):
            target = out + r * gap + i * 4
            tile_ir.multiply(weights + r * line, line, values + i * 4, gap, target, gap, count, add)
    return 0


@by_address(6)
def attend_tile(step: int, layer: int, first: int, count: int, kv: int, scratch: int) -> int:
    """Tokens first:first + count, of one sequence, over what they see; one KV head. No group of layers has sinks.

    Scratch: sums of values, those of a split, scores, keys or values, keys turned, queries, pairs of both sums."""
    model, group, positions = ir.word(step, rec.MODEL), layer_group(step, layer), ir.word(step, rec.POSITIONS)
    each, dim = ir.word(model, rec.HEADS) // ir.word(model, rec.KV_HEADS), ir.word(model, rec.DIM)
    rows, wide, functions = count * each, rec.padded_to(dim, tile_ir.COLUMNS), ir.word(model, rec.FUNCTIONS)
    tall, gap, line = (rows + 5) // 6 * 6, (wide + rec.PAD) * 4, (rec.SPLIT + rec.PAD) * 4
    part = scratch + tall * gap
    scores = part + tall * gap
    kept = scores + tall * line
    turned, turned_line = kept + rec.TILE_KEYS * gap, (rec.TILE_KEYS + rec.PAD) * 4
    queries = turned + dim * turned_line
    pairs = queries + tall * dim * 4
    part_pairs = pairs + tall * 8
    _begin(step, first, rows, kv, queries, scratch, pairs, gap)
    start, end = recent_start(group, ir.word(positions, first)), ir.word(positions, first + count - 1) + 1
    all_from, all_to = recent_start(group, end - 1), ir.word(positions, first) + 1
    for base in range(start // rec.SPLIT * rec.SPLIT, end, rec.SPLIT):
        low, high = max(base, start), min(base + rec.SPLIT, end)
        whole = rec.padded_to(high - base, ir.WIDTH)
        for key in range(base, high, rec.TILE_KEYS):
            # What lies in a tile beside the keys is scored with them, and hidden.
            begins, ends = max(key, low), min(key + rec.TILE_KEYS, high)
            if begins < ends:
                _gather(step, layer, first, 0, kv, begins, ends - begins, kept + (begins - key) * gap, gap)
                tile_ir.turn(kept, gap, rec.TILE_KEYS, dim, turned, turned_line)
                run, own = ir.word(functions, rec.SCORE_TILE), scores + (key - base) * 4
                ir.call_8(run, step, tall, queries, turned, turned_line, rec.TILE_KEYS, own, kept)
        for r in range(rows):
            own = scores + r * line
            if base < all_from or base + whole > all_to:
                _hide(step, group, own, first + r // each, base, whole)
            soften(own, whole, part_pairs + r * 8)
        for key in range(low, high, rec.TILE_KEYS):
            found = min(rec.TILE_KEYS, high - key)
            _gather(step, layer, first, 1, kv, key, found, kept, gap)
            run, own = ir.word(functions, rec.ADD_VALUES), scores + (key - base) * 4
            ir.call_8(run, tall, own, kept, part, gap, wide, found, 1 if key > low else 0)
        for r in range(rows):
            join(scratch + r * gap, pairs + r * 8, part + r * gap, part_pairs + r * 8, dim)
    _end(step, first, rows, kv, scratch, pairs, gap)
    return 0
