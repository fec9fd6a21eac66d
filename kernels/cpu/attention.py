"""Attention over the paged cache, for `decode`: single tokens split by split, several of a sequence as tiles."""

from __future__ import annotations

import numpy as np

from kernels.cpu import attention_ir, kv_ir, tile_ir
from kernels.cpu import ir as ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.places import (
    block_table,
    first_key,
    key_place,
    last_key,
    layer_group,
    layer_place,
    plane_bytes,
    recent_start,
)
from kernels.cpu.splits import MINUS_INFINITY, begin, join, soften
from kernels.cpu.tickets import draw, finish
from kernels.cpu.tile_attention import widen


@compiled("void(int64, int64, int64, int64, int64)")
def _put_run(runs: int, index: int, row: int, count: int, ahead: int) -> None:
    run = runs + index * attention_ir.RUN_BYTES
    ir.put_word(run, 0, row)
    ir.put_word(run, 1, count)
    ir.put_word(run, 2, ahead)


@compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def _runs(step: int, layer: int, t: int, plane: int, kv: int, first: int, last: int, out: int) -> int:
    """K or V at positions first:last of the sequence of token `t`: for each block where they lie, how many they are,
    and what is to be fetched meanwhile, which is V for K. Returns the number of blocks."""
    block_size, table, number = ir.word(step, rec.BLOCK_SIZE), block_table(step, layer, t), 0
    store_index, below = ir.word(layer_place(step, layer), rec.STORE_INDEX), plane_bytes(step)
    while first < last:
        block, offset = ir.word32(table, first // block_size), first % block_size
        count = min(block_size - offset, last - first)
        row = key_place(step, store_index, kv, block, offset) + plane * below
        _put_run(out, number, row, count, row + below)
        number, first = number + 1, first + count
    return number


@compiled("void(int64, int64, int64, int64, int64)")
def _fetch_later(step: int, layer: int, item: int, runs: int, number: int) -> None:
    """While values are summed, the keys are fetched that this thread will probably need next. Behind `runs` is room."""
    group, t = layer_group(step, layer), ir.word(item, rec.FIRST_TOKEN)
    position, base = ir.word(ir.word(step, rec.POSITIONS), t), ir.word(item, rec.SPLIT_INDEX) * rec.SPLIT
    first, last = max(base, first_key(group, position)), min(base + rec.SPLIT, last_key(group, position))
    later = runs + rec.SPLIT * attention_ir.RUN_BYTES
    found = _runs(step, layer, t, 0, ir.word(item, rec.FIRST_KV), first, last, later)
    for i in range(min(number, found)):
        ir.put_word(runs + i * attention_ir.RUN_BYTES, 2, ir.word(later + i * attention_ir.RUN_BYTES, 0))


@compiled("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _find(
    step: int, layer: int, t: int, plane: int, kv: int, first: int, count: int, unpacked: int, later: int, runs: int
) -> int:
    """As `_runs`, of rows in 16 or 32 bits: those in the cache, or `unpacked` ones, all of them in one block."""
    if ir.word(step, rec.KV_KIND) > kv_ir.BF16:
        block_size, store_index = ir.word(step, rec.BLOCK_SIZE), ir.word(layer_place(step, layer), rec.STORE_INDEX)
        table = block_table(step, layer, t)
        block, gap = ir.word32(table, first // block_size), ir.word(ir.word(step, rec.MODEL), rec.DIM) * 4
        widen(step, store_index, plane, kv, block, first % block_size, count, unpacked, gap)
        _put_run(runs, 0, unpacked, count, unpacked)
        return 1
    number = _runs(step, layer, t, plane, kv, first, first + count, runs)
    if plane and later:
        _fetch_later(step, layer, later, runs, number)
    return number


@compiled("void(int64, int64, int64, int64)")
def _hide_around(line: int, first: int, last: int, count: int) -> None:
    """All scores [count] but first:last."""
    for i in range(first):
        ir.put(line, i, MINUS_INFINITY)
    for i in range(last, count):
        ir.put(line, i, MINUS_INFINITY)


@by_address(9)
def score_rows(
    step: int, kind: int, heads: int, out: int, q: int, runs: int, number: int, stride: int, kv_heads: int
) -> int:
    """Scores of a split as a function of its own: inside a large one its sums would not stay in registers."""
    model, line = ir.word(step, rec.MODEL), rec.SPLIT * 4
    dim, each = ir.word(model, rec.DIM), ir.word(model, rec.HEADS) // ir.word(model, rec.KV_HEADS)
    size, scale = ir.word(step, rec.HEAD_BYTES), ir.get(ir.word(model, rec.SCALARS), 2)
    attention_ir.scores(kind, heads, out, line, q, runs, number, stride, dim, scale, kv_heads, each, size)
    return 0


@by_address(9)
def accumulate_rows(
    step: int, kind: int, heads: int, out: int, weights: int, runs: int, number: int, stride: int, kv_heads: int
) -> int:
    """Its weighted sums of values, likewise."""
    model, line, size = ir.word(step, rec.MODEL), rec.SPLIT * 4, ir.word(step, rec.HEAD_BYTES)
    dim, each = ir.word(model, rec.DIM), ir.word(model, rec.HEADS) // ir.word(model, rec.KV_HEADS)
    gap = ir.word(step, rec.SPLITS) * (dim + 2) * 4
    attention_ir.accumulate(kind, heads, out, gap, weights, line, runs, number, stride, dim, kv_heads, each, size)
    return 0


@by_address(8)
def attend(step: int, layer: int, t: int, split: int, first_kv: int, last_kv: int, later: int, scratch: int) -> int:
    """A split of what a token sees, into PARTS, for the query heads of some KV heads; `later` is the item that comes
    after it, 0 for none.

    Keys beyond the window are sinks, which have queries of their own. Scratch: runs, scores, then unpacked rows."""
    model, kind, block_size = ir.word(step, rec.MODEL), ir.word(step, rec.KV_KIND), ir.word(step, rec.BLOCK_SIZE)
    dim, splits, heads = ir.word(model, rec.DIM), ir.word(step, rec.SPLITS), ir.word(model, rec.HEADS)
    each, group = heads // ir.word(model, rec.KV_HEADS), layer_group(step, layer)
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
    functions, packed, runs = ir.word(model, rec.FUNCTIONS), kind > kv_ir.BF16, scratch
    scratch += rec.RUN_ROOM
    unpacked = scratch + (last_kv - first_kv) * each * line
    stride = dim * 4 if packed else ir.word(model, rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    read, at_once = (kv_ir.FP32, 1) if packed else (kind, last_kv - first_kv)
    for plane in range(2):
        index = start
        while index < end:
            place, stop, query = index + shift, end, near
            if index < kept:
                place, stop, query = index, min(end, kept), far
            count = min(stop - index, min(block_size - place % block_size, rec.UNPACKED_ROWS) if packed else rec.SPLIT)
            for kv in range(first_kv, last_kv, at_once):
                number = _find(step, layer, t, plane, kv, place, count, unpacked, later, runs)
                own = scratch + ((kv - first_kv) * each * rec.SPLIT + index - base) * 4
                for g in range(0, each, attention_ir.MAX_HEADS):
                    some, head, scores = min(each - g, attention_ir.MAX_HEADS), kv * each + g, own + g * line
                    if plane:
                        run, out = ir.word(functions, rec.ACCUMULATE), parts + head * gap
                        ir.call_9(run, step, read, some, out, scores, runs, number, stride, at_once)
                    else:
                        run, q = ir.word(functions, rec.SCORE), query + head * dim * 4
                        ir.call_9(run, step, read, some, scores, q, runs, number, stride, at_once)
            index += count
        if plane == 0:
            for head in range(first_kv * each, last_kv * each):
                own, part = scratch + (head - first_kv * each) * line, parts + head * gap
                _hide_around(own, start - base, end - base, whole)
                for i in range(dim):
                    ir.put(part, i, np.float32(0.0))
                soften(own, whole, part + dim * 4)
    return 0


@compiled("int64(int64, int64, int64)")
def _later(group: int, task: int, apart: int) -> int:
    """The item that a thread will probably draw next if its tasks are so far apart; 0 for none that is a split."""
    item = ir.word(group, rec.ITEMS) + (task + apart) * rec.ITEM_WORDS * 8
    ends = task + apart >= ir.word(group, rec.ITEM_COUNT) or ir.word(group, rec.SINKS) != 0
    return 0 if ends or ir.word(item, rec.SPLIT_INDEX) < 0 else item


@by_address(5)
def attention(sync: int, phase: int, step: int, layer: int, scratch: int) -> int:
    """Each token over the cached positions that it sees, item by item, as far as tickets go."""
    group, functions = layer_group(step, layer), ir.word(ir.word(step, rec.MODEL), rec.FUNCTIONS)
    total = ir.word(group, rec.ITEM_COUNT)
    task, before = draw(sync, phase), -1
    while task < total:
        item = ir.word(group, rec.ITEMS) + task * rec.ITEM_WORDS * 8
        t, split = ir.word(item, rec.FIRST_TOKEN), ir.word(item, rec.SPLIT_INDEX)
        first, last = ir.word(item, rec.FIRST_KV), ir.word(item, rec.LAST_KV)
        if split < 0:
            count = ir.word(item, rec.TOKEN_COUNT)
            ir.call_6(ir.word(functions, rec.ATTEND_TILE), step, layer, t, count, first, scratch)
        else:
            later = _later(group, task, task - before)
            ir.call_8(ir.word(functions, rec.ATTEND), step, layer, t, split, first, last, later, scratch)
        finish(sync, phase)
        task, before = draw(sync, phase), task
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
