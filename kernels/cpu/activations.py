"""Rows of activations on their way into a product: norms, and int8 codes block by block (`panel_ir`)."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import panel_ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.tickets import draw, finish


@compiled("void(int64, int64, int64, int64, int64, int64)")
def quantise_one(x: int, out: int, rows: int, row: int, blocks: int, block: int) -> None:
    """32 float32 into block `block` of a row of the activations `out`, which have so many rows and blocks."""
    scale = out + rows * blocks * 32 + (block * rows + row) * 8
    panel_ir.quantise_block(x, out + (row * blocks + block) * 32, scale)


@by_address(6)
def quantise_row(x: int, size: int, tail: int, out: int, rows: int, row: int) -> int:
    """x float32 [size] as a row of the activations `out`; `tail` is room for 32 floats."""
    blocks = (size + 31) // 32
    for block in range(size // 32):
        quantise_one(x + block * 128, out, rows, row, blocks, block)
    if size % 32:
        for i in range(32):
            ir.put(tail, i, ir.get(x, blocks * 32 - 32 + i) if blocks * 32 - 32 + i < size else np.float32(0.0))
        quantise_one(tail, out, rows, row, blocks, blocks - 1)
    return 0


@by_address(5)
def norm(x: int, weight: int, scalars: int, size: int, out: int) -> int:
    """out = x / rms(x) * weight, all float32 [size]; eps is the first scalar."""
    total = np.float32(0.0)
    for i in range(size):
        total += ir.get(x, i) * ir.get(x, i)
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(size) + ir.get(scalars, 0)))
    for i in range(size):
        ir.put(out, i, ir.get(x, i) * scale * ir.get(weight, i))
    return 0


@by_address(5)
def normed(sync: int, phase: int, step: int, weight: int, scratch: int) -> int:
    """The norm of each row of X into ROWS, as far as tickets go; returns the number of tasks."""
    model, total = ir.word(step, rec.MODEL), ir.word(step, rec.TOKENS)
    functions, hidden = ir.word(model, rec.FUNCTIONS), ir.word(model, rec.HIDDEN)
    out, rows = ir.word(step, rec.ROWS), rec.tiled(total)
    task = draw(sync, phase)
    while task < total:
        x = ir.word(step, rec.X) + task * hidden * 4
        ir.call_5(ir.word(functions, rec.NORM_ROW), x, weight, ir.word(model, rec.SCALARS), hidden, scratch)
        ir.call_6(ir.word(functions, rec.QUANTISE_ROW), scratch, hidden, scratch + hidden * 4, out, rows, task)
        finish(sync, phase)
        task = draw(sync, phase)
    return total
