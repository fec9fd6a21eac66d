"""Products of quantised weights with rows of activations, task by task."""

from __future__ import annotations

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import panel_ir
from kernels.cpu import records as rec
from kernels.cpu.activations import quantise_one
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.tickets import draw, finish, wait


@compiled("int64(int64)")
def panels_of_task(matrix: int) -> int:
    return max(1, rec.TASK_WEIGHTS // (ir.word(matrix, rec.BLOCKS) * 32 * panel_ir.PANEL))


@compiled("int64(int64)")
def panel_count(matrix: int) -> int:
    return (ir.word(matrix, rec.ROWS_OUT) + panel_ir.PANEL - 1) // panel_ir.PANEL


@compiled("int64(int64)")
def task_count(matrix: int) -> int:
    panels = panels_of_task(matrix)
    return (panel_count(matrix) + panels - 1) // panels


@by_address(5)
def dots(matrix: int, panel: int, x: int, tokens: int, out: int) -> int:
    """out float32 [tokens, 8] = a panel of the matrix · rows of activations; `tokens` is 1 or whole tiles."""
    fmt, blocks = ir.word(matrix, rec.FORMAT), ir.word(matrix, rec.BLOCKS)
    weights, stride = ir.word(matrix, rec.ADDRESS) + panel * ir.word(matrix, rec.PANEL_BYTES), blocks * 40
    if tokens == 1:
        if fmt == ir.Q4_1:
            panel_ir.panel_q4_1(weights, blocks, x, stride, out)
        elif fmt == ir.Q8_0:
            panel_ir.panel_q8_0(weights, blocks, x, stride, out)
        else:
            panel_ir.panel_q4_0(weights, blocks, x, stride, out)
        return 0
    for t in range(0, tokens, panel_ir.TOKEN_TILE):
        rows, target = x + t * stride, out + t * panel_ir.PANEL * 4
        if fmt == ir.Q4_1:
            panel_ir.tile_q4_1(weights, blocks, rows, stride, target)
        elif fmt == ir.Q8_0:
            panel_ir.tile_q8_0(weights, blocks, rows, stride, target)
        else:
            panel_ir.tile_q4_0(weights, blocks, rows, stride, target)
    return 0


@compiled("void(int64, int64, int64, int64, int64, int64, int64)")
def _put(matrix: int, panel: int, tokens: int, dot: int, out: int, stride: int, add: int) -> None:
    """Rows of a panel with factor and bias into columns of out [tokens, stride]; the last panel may hold fewer."""
    row, bias = panel * panel_ir.PANEL, ir.word(matrix, rec.BIAS)
    count, factor = ir.word(matrix, rec.ROWS_OUT) - row, ir.get(ir.word(matrix, rec.FACTOR), 0)
    bias = bias + row * 4 if bias else 0
    for t in range(tokens):
        target, source = out + t * stride * 4, dot + t * panel_ir.PANEL * 4
        if count < panel_ir.PANEL:
            for i in range(count):
                value = ir.get(source, i) * factor + (ir.get(bias, i) if bias else np.float32(0.0))
                ir.put(target, i, value + (ir.get(target, i) if add else np.float32(0.0)))
        elif add:
            panel_ir.add_panel(target, source, factor, bias)
        else:
            panel_ir.put_panel(target, source, factor, bias)


@by_address(9)
def product(sync: int, phase: int, matrix: int, x: int, tokens: int, dot: int, out: int, stride: int, add: int) -> int:
    """out (+)= x · matrixᵀ * factor + bias, as far as tickets go; rows of `out` are `stride` floats apart.

    Returns the number of tasks.
    """
    panels, total, tiled = panels_of_task(matrix), task_count(matrix), rec.tiled(tokens)
    task = draw(sync, phase)
    while task < total:
        for panel in range(task * panels, min((task + 1) * panels, panel_count(matrix))):
            ir.call_5(ir.word(matrix, rec.DOT), matrix, panel, x, tiled, dot)
            _put(matrix, panel, tokens, dot, out + panel * panel_ir.PANEL * 4, stride, add)
        finish(sync, phase)
        task = draw(sync, phase)
    return total


@by_address(8)
def gated(sync: int, phase: int, gate: int, up: int, x: int, tokens: int, scratch: int, out: int) -> int:
    """silu(x · gateᵀ) * (x · upᵀ) as rows of activations, as far as tickets go: a task is one of their blocks.

    Scratch: dots, then gate and up [tokens, 32]. Returns the number of tasks.
    """
    total, tiled, count = (ir.word(gate, rec.ROWS_OUT) + 31) // 32, rec.tiled(tokens), panel_count(gate)
    gates = scratch + tiled * panel_ir.PANEL * 4
    ups = gates + tiled * 128
    task = draw(sync, phase)
    while task < total:
        if task * 32 + 32 > ir.word(gate, rec.ROWS_OUT):
            for i in range(tiled * 64):
                ir.put(gates, i, np.float32(0.0))
        for i in range(min(4, count - task * 4)):
            for matrix, place in ((gate, gates), (up, ups)):
                ir.call_5(ir.word(matrix, rec.DOT), matrix, task * 4 + i, x, tiled, scratch)
                _put(matrix, task * 4 + i, tokens, scratch, place + i * 32, 32, 0)
        for t in range(tokens):
            for i in range(4):
                place = t * 128 + i * 32
                panel_ir.gate_panel(gates + place, gates + place, ups + place)
            quantise_one(gates + t * 128, out + t * total * 40, total, task)
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
        source, target = x + task * columns * 4, rows + task * rec.row_bytes(columns)
        ir.call_4(ir.word(functions, rec.QUANTISE_ROW), source, columns, scratch, target)
        finish(sync, 0)
        task = draw(sync, 0)
    wait(sync, 0, tokens)
    run, count = ir.word(functions, rec.PRODUCT), ir.word(matrix, rec.ROWS_OUT)
    wait(sync, 1, ir.call_9(run, sync, 1, matrix, rows, tokens, scratch, ir.word(job, rec.JOB_OUT), count, 0))
    return 0
