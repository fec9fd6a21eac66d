"""Products of quantised weights with rows of activations, task by task."""

from __future__ import annotations

import numpy as np

from kernels.cpu import amx, panel_ir
from kernels.cpu import ir as ir
from kernels.cpu import records as rec
from kernels.cpu.activations import quantise_one
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.tickets import draw, finish, wait


@compiled("int64(int64)")
def panels_of_task(matrix: int) -> int:
    """An even number, since two are multiplied together where tiles are."""
    return max(2, rec.TASK_WEIGHTS // (ir.word(matrix, rec.BLOCKS) * 32 * panel_ir.PANEL) // 2 * 2)


@compiled("int64(int64)")
def panel_count(matrix: int) -> int:
    return (ir.word(matrix, rec.ROWS_OUT) + panel_ir.PANEL - 1) // panel_ir.PANEL


@compiled("int64(int64)")
def task_count(matrix: int) -> int:
    panels = panels_of_task(matrix)
    return (panel_count(matrix) + panels - 1) // panels


@compiled("int64(int64, int64)")
def _bias(matrix: int, panel: int) -> int:
    """Address of a panel's biases, 0 for none."""
    bias = ir.word(matrix, rec.BIAS)
    return bias + panel * panel_ir.PANEL * 4 if bias else 0


@by_address(6)
def dots(matrix: int, panel: int, x: int, rows: int, first: int, out: int) -> int:
    """out float32 [rows, 8] = a panel of the matrix · activations, from row `first` on; `rows` is 1 or whole tiles."""
    fmt, blocks = ir.word(matrix, rec.FORMAT), ir.word(matrix, rec.BLOCKS)
    weights, scales = ir.word(matrix, rec.ADDRESS) + panel * ir.word(matrix, rec.PANEL_BYTES), x + rows * blocks * 32
    if rows == 1:
        if fmt == ir.Q4_1:
            panel_ir.panel_q4_1(weights, blocks, x, scales, 8, out)
        elif fmt == ir.Q8_0:
            panel_ir.panel_q8_0(weights, blocks, x, scales, 8, out)
        else:
            panel_ir.panel_q4_0(weights, blocks, x, scales, 8, out)
        return 0
    for t in range(first, rows, panel_ir.TOKEN_TILE):
        codes, own, target = x + t * blocks * 32, scales + t * 8, out + t * panel_ir.PANEL * 4
        if fmt == ir.Q4_1:
            panel_ir.tile_q4_1(weights, blocks, codes, own, rows * 8, target)
        elif fmt == ir.Q8_0:
            panel_ir.tile_q8_0(weights, blocks, codes, own, rows * 8, target)
        else:
            panel_ir.tile_q4_0(weights, blocks, codes, own, rows * 8, target)
    return 0


if amx.HAS_AMX:

    @by_address(8)
    def tile_product(matrix: int, panel: int, x: int, tokens: int, room: int, out: int, stride: int, add: int) -> int:
        """As `_put` of two whole panels, for as many tokens as are whole tiles; returns how many. `room` takes the
        panels as bytes."""
        fmt, blocks, size = ir.word(matrix, rec.FORMAT), ir.word(matrix, rec.BLOCKS), ir.word(matrix, rec.PANEL_BYTES)
        weights, rows = ir.word(matrix, rec.ADDRESS) + panel * size, rec.tiled(tokens)
        scales, gap, bias = x + rows * blocks * 32, rows * 8, _bias(matrix, panel)
        factor = ir.word(matrix, rec.FACTOR)
        if fmt == ir.Q4_1:
            amx.spread_q4_1(weights, size, blocks, room)
        elif fmt == ir.Q8_0:
            amx.spread_q8_0(weights, size, blocks, room)
        else:
            amx.spread_q4_0(weights, size, blocks, room)
        amx.begin(0)
        for t in range(0, tokens - amx.TOKENS + 1, amx.TOKENS):
            codes, own, target = x + t * blocks * 32, scales + t * 8, out + t * stride * 4
            if fmt == ir.Q4_1:
                amx.square_q4_1(room, blocks, codes, own, gap, target, stride * 4, factor, bias, add)
            elif fmt == ir.Q8_0:
                amx.square_q8_0(room, blocks, codes, own, gap, target, stride * 4, factor, bias, add)
            else:
                amx.square_q4_0(room, blocks, codes, own, gap, target, stride * 4, factor, bias, add)
        amx.end(0)
        return tokens // amx.TOKENS * amx.TOKENS


def tile_product_address() -> int:
    """0 where there are no such tiles."""
    return tile_product.address if amx.is_allowed() else 0


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _put(matrix: int, panel: int, first: int, tokens: int, dot: int, out: int, stride: int, add: int) -> None:
    """out [tokens, stride] = add * out + a panel's dots * factor + bias, for tokens from `first` on; the last panel may
    hold fewer columns."""
    count, bias = ir.word(matrix, rec.ROWS_OUT) - panel * panel_ir.PANEL, _bias(matrix, panel)
    factor = ir.get(ir.word(matrix, rec.FACTOR), 0)
    for t in range(first, tokens):
        target, source = out + t * stride * 4, dot + t * panel_ir.PANEL * 4
        if count >= panel_ir.PANEL:
            panel_ir.put_panel(target, source, factor, bias, add)
        else:
            for i in range(count):
                value = ir.get(source, i) * factor + (ir.get(bias, i) if bias else np.float32(0.0))
                ir.put(target, i, value + (ir.get(target, i) if add else np.float32(0.0)))


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _panels(
    matrix: int, first: int, last: int, x: int, tokens: int, scratch: int, out: int, stride: int, add: int
) -> None:
    """Panels first:last into columns of `out`, the first of them at its start; by tiles as far as these go."""
    run, width, rows = ir.word(matrix, rec.TILE_PRODUCT), panel_ir.PANEL, rec.tiled(tokens)
    for panel in range(first, last, 2):
        done, target = 0, out + (panel - first) * width * 4
        if run and tokens >= amx.TOKENS and panel + 1 < last and (panel + 2) * width <= ir.word(matrix, rec.ROWS_OUT):
            done = ir.call_8(run, matrix, panel, x, tokens, scratch, target, stride, add)
        if done < tokens:
            for own in range(panel, min(panel + 2, last)):
                ir.call_6(ir.word(matrix, rec.DOT), matrix, own, x, rows, done, scratch)
                _put(matrix, own, done, tokens, scratch, out + (own - first) * width * 4, stride, add)


@by_address(9)
def product(
    sync: int, phase: int, matrix: int, x: int, tokens: int, scratch: int, out: int, stride: int, add: int
) -> int:
    """out (+)= x · matrixᵀ * factor + bias, as far as tickets go; rows of `out` are `stride` floats apart.

    Returns the number of tasks.
    """
    panels, total = panels_of_task(matrix), task_count(matrix)
    task = draw(sync, phase)
    while task < total:
        first, last = task * panels, min((task + 1) * panels, panel_count(matrix))
        _panels(matrix, first, last, x, tokens, scratch, out + first * panel_ir.PANEL * 4, stride, add)
        finish(sync, phase)
        task = draw(sync, phase)
    return total


@by_address(8)
def gated(sync: int, phase: int, gate: int, up: int, x: int, tokens: int, scratch: int, out: int) -> int:
    """silu(x · gateᵀ) * (x · upᵀ) as rows of activations, as far as tickets go: a task is one of their blocks.

    Scratch: what a product needs, in front of it gate and up [tokens, 32]. Returns the number of tasks.
    """
    total, tiled = (ir.word(gate, rec.ROWS_OUT) + 31) // 32, rec.tiled(tokens)
    gates, ups = scratch, scratch + tiled * 128
    scratch = ups + tiled * 128
    task = draw(sync, phase)
    while task < total:
        if task * 32 + 32 > ir.word(gate, rec.ROWS_OUT):
            for i in range(tiled * 64):
                ir.put(gates, i, np.float32(0.0))
        first, last = task * 4, min(task * 4 + 4, panel_count(gate))
        _panels(gate, first, last, x, tokens, scratch, gates, 32, 0)
        _panels(up, first, last, x, tokens, scratch, ups, 32, 0)
        for t in range(tokens):
            for i in range(4):
                place = t * 128 + i * 32
                panel_ir.gate_panel(gates + place, gates + place, ups + place)
            quantise_one(gates + t * 128, out, tiled, t, total, task)
        finish(sync, phase)
        task = draw(sync, phase)
    return total


@by_address(5)
def project(sync: int, job: int, first: int, last: int, thread: int) -> int:
    """out [tokens, rows] = x [tokens, columns] · matrixᵀ, as a record of `rec.JOB_WORDS` says."""
    matrix, tokens, columns = ir.word(job, rec.JOB_MATRIX), ir.word(job, rec.JOB_TOKENS), ir.word(job, rec.JOB_COLUMNS)
    functions, scratch = ir.word(job, rec.JOB_FUNCTIONS), ir.word(job, rec.JOB_SCRATCH)
    scratch += thread * ir.word(job, rec.JOB_SCRATCH_BYTES)
    x, rows = ir.word(job, rec.JOB_X), ir.word(job, rec.JOB_ROWS)
    task = draw(sync, 0)
    while task < tokens:
        source, run = x + task * columns * 4, ir.word(functions, rec.QUANTISE_ROW)
        ir.call_6(run, source, columns, scratch, rows, rec.tiled(tokens), task)
        finish(sync, 0)
        task = draw(sync, 0)
    wait(sync, 0, tokens)
    run, count = ir.word(functions, rec.PRODUCT), ir.word(matrix, rec.ROWS_OUT)
    wait(sync, 1, ir.call_9(run, sync, 1, matrix, rows, tokens, scratch, ir.word(job, rec.JOB_OUT), count, 0))
    return 0
