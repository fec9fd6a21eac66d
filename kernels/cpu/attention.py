"""Attention over the paged cache, for `decode`: single tokens split by split, several of a sequence as tiles."""

from __future__ import annotations

import numpy as np

from kernels.cpu import attention_ir, kv_ir, tile_ir
from kernels.cpu import ir as ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.places import first_key, key_place, last_key, layer_group, layer_place, plane_bytes, recent_start
from kernels.cpu.splits import MINUS_INFINITY, begin, join, soften
from kernels.cpu.tickets import draw, finish
from kernels.cpu.tile_attention import widen


@compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def _rows(step: int, store_index: int, plane: int, kv: int, block: int, offset: int, count: int, unpacked: int) -> int:
    """Where `count` rows of a block can be read in 16 or 32 bits: in the cache, or `unpacked`."""
    if ir.word(step, rec.KV_KIND) > kv_ir.BF16:
        gap = ir.word(ir.word(step, rec.MODEL), rec.DIM) * 4
        widen(step, store_index, plane, kv, block, offset, count, unpacked, gap)
        return unpacked
    return key_place(step, store_index, kv, block, offset) + plane * plane_bytes(step)


@compiled("void(int64, int64, int64, int64)")
def _hide_around(line: int, first: int, last: int, count: int) -> None:
    """All scores [count] but first:last."""
    for i in range(first):
        ir.put(line, i, MINUS_INFINITY)
    for i in range(last, count):
        ir.put(line, i, MINUS_INFINITY)


@compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def _read_next(step: int, store_index: int, plane: int, kv: int, table: int, place: int, first: int, left: int) -> int:
    """Where the rows lie that are read after those before `place`: in the next block, or, with nothing `left` in this
    plane, the first values. A guess: at worst something else is brought near."""
    block_size = ir.word(step, rec.BLOCK_SIZE)
    if left == 0:
        place, plane = first, 1
    row = key_place(step, store_index, kv, ir.word32(table, place // block_size), place % block_size)
    return row + plane * plane_bytes(step)


@by_address(10)
def score_rows(
    step: int, kind: int, heads: int, out: int, q: int, rows: int, count: int, stride: int, kv_heads: int, ahead: int
) -> int:
    """Scores of a split as a function of its own: inside a large one its sums would not stay in registers."""
    model, line = ir.word(step, rec.MODEL), rec.SPLIT * 4
    dim, each = ir.word(model, rec.DIM), ir.word(model, rec.HEADS) // ir.word(model, rec.KV_HEADS)
    size, scale = ir.word(step, rec.HEAD_BYTES), ir.get(ir.word(model, rec.SCALARS), 2)
    attention_ir.scores(kind, heads, out, line, q, rows, count, stride, dim, scale, kv_heads, each, size, ahead)
    return 0


@by_address(10)
def accumulate_rows(
    step: int, kind: int, heads: int, out: int, weights: int, rows: int, count: int, stride: int, kv_heads: int,
    ahead: int,
) -> int:  # fmt: skip
    """Its weighted sums of values, likewise."""
    model, line, size = ir.word(step, rec.MODEL), rec.SPLIT * 4, ir.word(step, rec.HEAD_BYTES)
    dim, each = ir.word(model, rec.DIM), ir.word(model, rec.HEADS) // ir.word(model, rec.KV_HEADS)
    gap = ir.word(step, rec.SPLITS) * (dim + 2) * 4
    attention_ir.accumulate(kind, heads, out, gap, weights, line, rows, count, stride, dim, kv_heads, each, size, ahead)
    return 0


@by_address(7)
def attend(step: int, layer: int, t: int, split: int, first_kv: int, last_kv: int, scratch: int) -> int:
    """A split of what a token sees, into PARTS, for the query heads of some KV heads.

    Keys beyond the window are sinks, which have queries of their own. Scratch: scores, then unpacked rows."""
    model, kind, block_size = ir.word(step, rec.MODEL), ir.word(step, rec.KV_KIND), ir.word(step, rec.BLOCK_SIZE)
    dim, splits, heads = ir.word(model, rec.DIM), ir.word(step, rec.SPLITS), ir.word(model, rec.HEADS)
    each, group = heads // ir.word(model, rec.KV_HEADS), layer_group(step, layer)
    store_index = ir.word(layer_place(step, layer), rec.STORE_INDEX)
    table = ir.word(group, rec.TABLES) + ir.word(ir.word(step, rec.SEQUENCES), t) * ir.word(group, rec.TABLE_WIDTH) * 4
    position = ir.word(ir.word(step, rec.POSITIONS), t)
    base, first = split * rec.SPLIT, first_key(group, position)
    start, end = max(base, first), min(base + rec.SPLIT, last_key(group, position))
    recent, whole = recent_start(group, position), rec.padded_to(end - base, ir.WIDTH)
    kept = min(ir.word(group, rec.SINKS), recent)
    shift = recent - kept if ir.word(group, rec.SINKS) else 0
    near = ir.word(step, rec.QKV) + t * ir.word(step, rec.QKV_WIDTH) * 4
    far = ir.word(step, rec.SINK_Q) + t * heads * dim * 4
    gap, line = splits * (dim + 2) * 4, rec.SPLIT * 4
    parts = ir.word(step, rec.PARTS) + ir.word(ir.word(step, rec.PART_ROWS), t) * heads * gap
    parts += (split - first // rec.SPLIT) * (dim + 2) * 4
    functions, packed = ir.word(model, rec.FUNCTIONS), kind > kv_ir.BF16
    ahead = unpacked = scratch + (last_kv - first_kv) * each * line
    most = rec.UNPACKED_ROWS if packed else block_size
    stride = dim * 4 if packed else ir.word(model, rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    read, at_once = (kv_ir.FP32, 1) if packed else (kind, last_kv - first_kv)
    for plane in range(2):
        index = start
        while index < end:
            place, stop, query = index + shift, end, near
            if index < kept:
                place, stop, query = index, min(end, kept), far
            offset, block = place % block_size, ir.word32(table, place // block_size)
            count = min(block_size - offset, stop - index, most)
            if not packed:
                left = end - index - count
                ahead = _read_next(step, store_index, plane, first_kv, table, place + count, start + shift, left)
            for kv in range(first_kv, last_kv, at_once):
                rows = _rows(step, store_index, plane, kv, block, offset, count, unpacked)
                own = scratch + ((kv - first_kv) * each * rec.SPLIT + index - base) * 4
                for g in range(0, each, attention_ir.MAX_HEADS):
                    some, head, scores = min(each - g, attention_ir.MAX_HEADS), kv * each + g, own + g * line
                    if plane:
                        run, out = ir.word(functions, rec.ACCUMULATE), parts + head * gap
                        ir.call_10(run, step, read, some, out, scores, rows, count, stride, at_once, ahead)
                    else:
                        run, q = ir.word(functions, rec.SCORE), query + head * dim * 4
                        ir.call_10(run, step, read, some, scores, q, rows, count, stride, at_once, ahead)
            index += count
        if plane == 0:
            for head in range(first_kv * each, last_kv * each):
                own, part = scratch + (head - first_kv * each) * line, parts + head * gap
                _hide_around(own, start - base, end - base, whole)
                for i in range(dim):
                    ir.put(part, i, np.float32(0.0))
                soften(own, whole, part + dim * 4)
    return 0


@by_address(5)
def attention(sync: int, phase: int, step: int, layer: int, scratch: int) -> int:
    """Each token over the cached positions that it sees, item by item, as far as tickets go."""
    group, functions = layer_group(step, layer), ir.word(ir.word(step, rec.MODEL), rec.FUNCTIONS)
    total = ir.word(group, rec.ITEM_COUNT)
    task = draw(sync, phase)
    while task < total:
        item = ir.word(group, rec.ITEMS) + task * rec.ITEM_WORDS * 8
        t, split = ir.word(item, rec.FIRST_TOKEN), ir.word(item, rec.SPLIT_INDEX)
        first, last = ir.word(item, rec.FIRST_KV), ir.word(item, rec.LAST_KV)
        if split < 0:
            count = ir.word(item, rec.TOKEN_COUNT)
            ir.call_6(ir.word(functions, rec.ATTEND_TILE), step, layer, t, count, first, scratch)
        else:
            ir.call_7(ir.word(functions, rec.ATTEND), step, layer, t, split, first, last, scratch)
        finish(sync, phase)
        task = draw(sync, phase)
    return total


@compiled("void(int64, int64, int64, int64, int64)")
def _combine(step: int, layer: int, t: int, part_row: int, pair: int) -> None:
    """The splits of each head of a token, one after the other, into ATTENDED_OUT."""
    model, group = ir.word(step, rec.MODEL), layer_group(step, layer)
    position = ir.word(ir.word(step, rec.POSITIONS), t)
    heads, dim = ir.word(model, rec.HEADS), ir.word(model, rec.DIM)
    gap = (dim + 2) * 4
    splits = (last_key(group, position) - 1) // rec.SPLIT - first_key(group, position) // rec.SPLIT + 1
    for head in range(heads):
        part = ir.word(step, rec.PARTS) + (part_row * heads + head) * ir.word(step, rec.SPLITS) * gap
        line = ir.word(step, rec.ATTENDED_OUT) + (t * heads + head) * dim * 4
        begin(line, pair, dim)
        for split in range(splits):
            join(line, pair, part + split * gap, part + split * gap + dim * 4, dim)
        tile_ir.scale(line, dim, np.float32(1.0) / ir.get(pair, 1))


@by_address(5)
def combined(sync: int, phase: int, step: int, layer: int, scratch: int) -> int:
    """What attention gave each token into ROWS, as far as tickets go; returns the number of tasks."""
    model, total = ir.word(step, rec.MODEL), ir.word(step, rec.TOKENS)
    wide, functions = ir.word(model, rec.HEADS) * ir.word(model, rec.DIM), ir.word(model, rec.FUNCTIONS)
    task = draw(sync, phase)
    while task < total:
        part_row = ir.word(ir.word(step, rec.PART_ROWS), task)
        if part_row >= 0:
            _combine(step, layer, task, part_row, scratch)
        source, target = ir.word(step, rec.ATTENDED_OUT) + task * wide * 4, ir.word(step, rec.ROWS)
        ir.call_6(ir.word(functions, rec.QUANTISE_ROW), source, wide, scratch, target, rec.tiled(total), task)
        finish(sync, phase)
        task = draw(sync, phase)
    return total
