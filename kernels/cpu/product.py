"""Matrix products over quantised blocks, norms, and the drawing of tasks."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled, yield_processor

_SPINS = 2000  # looks at a phase before the processor is offered to others


@compiled("int64(int64, int64)")
def draw(sync: int, phase: int) -> int:
    """The next task of a phase."""
    return ir.fetch_add(sync + phase * rec.SYNC_BYTES, 1)


@compiled("void(int64, int64)")
def finish(sync: int, phase: int) -> None:
    """One task is done."""
    ir.fetch_add(sync + phase * rec.SYNC_BYTES + 64, 1)


@compiled("int64(int64, int64)")
def finished(sync: int, phase: int) -> int:
    """Tasks that are done."""
    return ir.load_acquire(sync + phase * rec.SYNC_BYTES + 64)


@compiled("void(int64, int64, int64)")
def wait(sync: int, phase: int, total: int) -> None:
    """Until all tasks of a phase are done."""
    spins = 0
    while finished(sync, phase) < total:
        spins += 1
        if spins < _SPINS:
            ir.pause(0)
        else:
            yield_processor()


@compiled("int64(int64)")
def rows_of_task(matrix: int) -> int:
    return max(1, rec.TASK_WEIGHTS // (ir.word(matrix, rec.BLOCKS) * 32))


@compiled("int64(int64)")
def task_count(matrix: int) -> int:
    rows = rows_of_task(matrix)
    return (ir.word(matrix, rec.ROWS) + rows - 1) // rows


@by_address(3)
def block_sums(x: int, count: int, sums: int) -> int:
    """Sums of `count` blocks of 32."""
    for block in range(count):
        total = np.float32(0.0)
        for i in range(32):
            total += ir.get(x, block * 32 + i)
        ir.put(sums, block, total)
    return 0


@by_address(7)
def norm(x: int, rows: int, stride: int, weight: int, scalars: int, size: int, out: int) -> int:
    """out = x / rms(x) * weight for rows of `size`, `stride` floats apart, zeros behind; eps is the first scalar."""
    eps = ir.get(scalars, 0)
    for row in range(rows):
        source, target = x + row * stride * 4, out + row * stride * 4
        total = np.float32(0.0)
        for i in range(size):
            total += ir.get(source, i) * ir.get(source, i)
        scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(size) + eps))
        for i in range(size):
            ir.put(target, i, ir.get(source, i) * scale * ir.get(weight, i))
        for i in range(size, stride):
            ir.put(target, i, np.float32(0.0))
    return 0


@by_address(7)
def dots(matrix: int, first: int, last: int, x: int, sums: int, tokens: int, out: int) -> int:
    """out[r - first, t] = weight row r · row t of x; `tokens` is 1 or a multiple of the tile."""
    address, fmt = ir.word(matrix, rec.ADDRESS), ir.word(matrix, rec.FORMAT)
    row_bytes, blocks = ir.word(matrix, rec.ROW_BYTES), ir.word(matrix, rec.BLOCKS)
    x_stride, sums_stride, tile = blocks * 128, blocks * 4, ir.ROW_TILE
    for row in range(first, last):
        weights, target = address + row * row_bytes, out + (row - first) * tokens * 4
        if tokens == 1:
            if fmt == ir.Q4_1:
                ir.dot_q4_1(weights, blocks, x, 0, sums, 0, target)
            elif fmt == ir.Q8_0:
                ir.dot_q8_0(weights, blocks, x, 0, sums, 0, target)
            else:
                ir.dot_q4_0(weights, blocks, x, 0, sums, 0, target)
        else:
            for t in range(0, tokens, tile):
                xs, ss, to = x + t * x_stride, sums + t * sums_stride, target + t * 4
                if fmt == ir.Q4_1:
                    ir.tile_q4_1(weights, blocks, xs, x_stride, ss, sums_stride, to)
                elif fmt == ir.Q8_0:
                    ir.tile_q8_0(weights, blocks, xs, x_stride, ss, sums_stride, to)
                else:
                    ir.tile_q4_0(weights, blocks, xs, x_stride, ss, sums_stride, to)
    return 0


@compiled("float32(int64, int64, int64, int64)")
def _output(matrix: int, dot: int, index: int, row: int) -> float:
    value = ir.get(dot, index) * ir.get(ir.word(matrix, rec.FACTOR), 0)
    bias = ir.word(matrix, rec.BIAS)
    if bias:
        value += ir.get(bias, row)
    return value


@by_address(10)
def product(
    sync: int, phase: int, matrix: int, x: int, sums: int, tokens: int, dot: int, out: int, stride: int, add: int
) -> int:
    """out (+)= x · matrixᵀ * factor + bias, as far as tickets go; rows of `out` are `stride` floats apart.

    Returns the number of tasks.
    """
    rows, total = rows_of_task(matrix), task_count(matrix)
    task = draw(sync, phase)
    while task < total:
        first = task * rows
        last = min(first + rows, ir.word(matrix, rec.ROWS))
        ir.call_7(ir.word(matrix, rec.DOT), matrix, first, last, x, sums, tokens, dot)
        for t in range(tokens):
            for row in range(first, last):
                value = _output(matrix, dot, (row - first) * tokens + t, row)
                if add:
                    value += ir.get(out, t * stride + row)
                ir.put(out, t * stride + row, value)
        finish(sync, phase)
        task = draw(sync, phase)
    return total


@by_address(10)
def gated(
    sync: int, phase: int, gate: int, up: int, x: int, sums: int, tokens: int, dot: int, out: int, stride: int
) -> int:
    """out = silu(x · gateᵀ) * (x · upᵀ), as far as tickets go; returns the number of tasks."""
    rows, count = (rows_of_task(gate) + 1) // 2, ir.word(gate, rec.ROWS)
    total, ups = (count + rows - 1) // rows, dot + rows * tokens * 4
    task = draw(sync, phase)
    while task < total:
        first = task * rows
        last = min(first + rows, count)
        ir.call_7(ir.word(gate, rec.DOT), gate, first, last, x, sums, tokens, dot)
        ir.call_7(ir.word(up, rec.DOT), up, first, last, x, sums, tokens, ups)
        for t in range(tokens):
            for row in range(first, last):
                index = (row - first) * tokens + t
                value = _output(gate, dot, index, row)
                value = value / (np.float32(1.0) + math.exp(-value))
                ir.put(out, t * stride + row, value * _output(up, ups, index, row))
        finish(sync, phase)
        task = draw(sync, phase)
    return total


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def project(
    sync: int, functions: int, matrix: int, x: int, tokens: int, scratch: int, scratch_bytes: int, out: int, thread: int
) -> None:
    """out [tokens, rows] = x [tokens, padded columns] · matrixᵀ. Scratch of a thread: block sums, then dots."""
    blocks = ir.word(matrix, rec.BLOCKS)
    sums = scratch + thread * scratch_bytes
    ir.call_3(ir.word(functions, rec.BLOCK_SUMS), x, tokens * blocks, sums)
    dot = sums + tokens * blocks * 4
    rows, run = ir.word(matrix, rec.ROWS), ir.word(functions, rec.PRODUCT)
    wait(sync, 0, ir.call_10(run, sync, 0, matrix, x, sums, tokens, dot, out, rows, 0))


@compiled("void(int64, int64, int64, int64, int64, int64)")
def dequantise(sync: int, matrix: int, first: int, last: int, out: int, thread: int) -> None:
    """Weight rows first:last into float32 out [last - first, padded columns]."""
    rows, blocks = rows_of_task(matrix), ir.word(matrix, rec.BLOCKS)
    fmt, row_bytes, factor = ir.word(matrix, rec.FORMAT), ir.word(matrix, rec.ROW_BYTES), ir.word(matrix, rec.FACTOR)
    total = (last - first + rows - 1) // rows
    task = draw(sync, 0)
    while task < total:
        for row in range(first + task * rows, min(first + (task + 1) * rows, last)):
            source, target = ir.word(matrix, rec.ADDRESS) + row * row_bytes, out + (row - first) * blocks * 128
            if fmt == ir.Q4_1:
                ir.row_q4_1(source, blocks, target)
            elif fmt == ir.Q8_0:
                ir.row_q8_0(source, blocks, target)
            else:
                ir.row_q4_0(source, blocks, target)
            if ir.get(factor, 0) != np.float32(1.0):
                for i in range(blocks * 32):
                    ir.put(target, i, ir.get(target, i) * ir.get(factor, 0))
        finish(sync, 0)
        task = draw(sync, 0)
    wait(sync, 0, total)
