"""A step of few tokens through all layers as one compiled call, shared by the threads that happen to be there.

Work is cut into phases (a matrix product, attention, ...) and each phase into tasks that threads draw by ticket. A
phase is over when its tasks are done, not when every thread has come by: a thread that the system keeps away holds
nobody up unless it was in the middle of a task, and one that comes late finds the tickets gone and walks through. All
threads run the same function; what is cheap (norms, angles) each computes for itself. Sums are float32 throughout, and
a token's result does not depend on its neighbours in the batch.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import records as rec
from kernels.cpu.attention import angles, attention, combine, store
from kernels.cpu.compile import compiled
from kernels.cpu.product import block_sums, finished, gated, norm, product, task_count, wait


@compiled("void(int64, int64, int64, int64)")
def _attention_layer(sync: int, step: int, layer: int, scratch: int) -> None:
    """x += attention(norm(x)); K and V of the tokens are stored. Phases 0 to 5 of the layer."""
    model, first = ir.word(step, rec.MODEL), layer * rec.PHASES
    record = ir.word(model, rec.LAYER_RECORDS) + layer * rec.LAYER_WORDS * 8
    rows, hidden, x = ir.word(step, rec.TILED), ir.word(model, rec.HIDDEN_PADDED), ir.word(step, rec.X)
    sums, dot = scratch + ir.word(step, rec.SUMS) * 4, scratch + ir.word(step, rec.DOTS) * 4
    eps, size = ir.get(ir.word(model, rec.SCALARS), 0), ir.word(model, rec.HIDDEN)
    norm(x, rows, hidden, ir.word(record, rec.ATTN_NORM), eps, size, scratch)
    for i in range(size, hidden):
        for row in range(rows):
            ir.put(scratch, row * hidden + i, np.float32(0.0))
    block_sums(scratch, rows * hidden // 32, sums)
    out, width = ir.word(step, rec.QKV), ir.word(step, rec.QKV_WIDTH)
    for i in range(3):
        matrix = record + i * rec.MATRIX_WORDS * 8
        product(sync, first + i, matrix, scratch, sums, rows, dot, out, width, 0)
        out += ir.word(matrix, rec.ROWS) * 4
    for i in range(3):
        wait(sync, first + i, task_count(record + i * rec.MATRIX_WORDS * 8))
    wait(sync, first + 3, store(sync, first + 3, step, layer, scratch + ir.word(step, rec.ANGLES) * 4))
    wait(sync, first + 4, attention(sync, first + 4, step, layer, scratch + ir.word(step, rec.SCORES) * 4))
    wide = ir.word(model, rec.HEADS_PADDED)
    for i in range(rows * wide):
        ir.put(scratch, i, np.float32(0.0))
    combine(step, scratch)
    block_sums(scratch, rows * wide // 32, sums)
    o = record + rec.O * rec.MATRIX_WORDS * 8
    wait(sync, first + 5, product(sync, first + 5, o, scratch, sums, rows, dot, x, hidden, 1))


@compiled("void(int64, int64, int64, int64)")
def _mlp_layer(sync: int, step: int, layer: int, scratch: int) -> None:
    """x += mlp(norm(x)). Phases 6 and 7 of the layer."""
    model, first = ir.word(step, rec.MODEL), layer * rec.PHASES
    record = ir.word(model, rec.LAYER_RECORDS) + layer * rec.LAYER_WORDS * 8
    rows, hidden, inner = ir.word(step, rec.TILED), ir.word(model, rec.HIDDEN_PADDED), ir.word(model, rec.INNER_PADDED)
    sums, dot = scratch + ir.word(step, rec.SUMS) * 4, scratch + ir.word(step, rec.DOTS) * 4
    eps, size = ir.get(ir.word(model, rec.SCALARS), 0), ir.word(model, rec.HIDDEN)
    x, act = ir.word(step, rec.X), ir.word(step, rec.ACT)
    norm(x, rows, hidden, ir.word(record, rec.MLP_NORM), eps, size, scratch)
    for i in range(size, hidden):
        for row in range(rows):
            ir.put(scratch, row * hidden + i, np.float32(0.0))
    block_sums(scratch, rows * hidden // 32, sums)
    gate, up = record + rec.GATE * rec.MATRIX_WORDS * 8, record + rec.UP * rec.MATRIX_WORDS * 8
    wait(sync, first + 6, gated(sync, first + 6, gate, up, scratch, sums, rows, dot, act, inner))
    block_sums(act, rows * inner // 32, sums)
    down = record + rec.DOWN * rec.MATRIX_WORDS * 8
    wait(sync, first + 7, product(sync, first + 7, down, act, sums, rows, dot, x, hidden, 1))


@compiled("void(int64, int64, int64)")
def decode(sync: int, step: int, thread: int) -> None:
    """All layers over X; thread 0 puts the last norm into OUT."""
    model = ir.word(step, rec.MODEL)
    scratch = ir.word(step, rec.SCRATCH) + thread * ir.word(step, rec.SCRATCH_BYTES)
    angles(step, scratch + ir.word(step, rec.ANGLES) * 4)
    for layer in range(ir.word(model, rec.LAYERS)):
        down = ir.word(model, rec.LAYER_RECORDS) + (layer * rec.LAYER_WORDS + rec.DOWN * rec.MATRIX_WORDS) * 8
        if finished(sync, layer * rec.PHASES + 7) < task_count(down):
            _attention_layer(sync, step, layer, scratch)
            _mlp_layer(sync, step, layer, scratch)
    if thread == 0:
        eps, hidden = ir.get(ir.word(model, rec.SCALARS), 0), ir.word(model, rec.HIDDEN_PADDED)
        size, weight = ir.word(model, rec.HIDDEN), ir.word(model, rec.NORM)
        norm(ir.word(step, rec.X), ir.word(step, rec.TILED), hidden, weight, eps, size, ir.word(step, rec.OUT))
