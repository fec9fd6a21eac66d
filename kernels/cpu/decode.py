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
from kernels.cpu.attention import attend, attention, combine
from kernels.cpu.compile import compiled
from kernels.cpu.product import block_sums, finished, gated, norm, product, task_count, wait
from kernels.cpu.store import angles, store

FUNCTIONS = np.zeros(rec.FUNCTION_WORDS, np.int64)
"""What `rec.FUNCTIONS` points to."""
FUNCTIONS[rec.BLOCK_SUMS] = block_sums.address
FUNCTIONS[rec.NORMALISE] = norm.address
FUNCTIONS[rec.PRODUCT] = product.address
FUNCTIONS[rec.GATED] = gated.address
FUNCTIONS[rec.STORE] = store.address
FUNCTIONS[rec.ATTENTION] = attention.address
FUNCTIONS[rec.ATTEND] = attend.address
FUNCTIONS[rec.COMBINE] = combine.address


@compiled("void(int64, int64, int64, int64, int64)")
def _normed(step: int, x: int, weight: int, out: int, sums: int) -> None:
    """The norm of x [TILED, hidden padded] into out, and the sums of its blocks."""
    model = ir.word(step, rec.MODEL)
    functions, rows, hidden = ir.word(model, rec.FUNCTIONS), ir.word(step, rec.TILED), ir.word(model, rec.HIDDEN_PADDED)
    size, scalars = ir.word(model, rec.HIDDEN), ir.word(model, rec.SCALARS)
    ir.call_7(ir.word(functions, rec.NORMALISE), x, rows, hidden, weight, scalars, size, out)
    ir.call_3(ir.word(functions, rec.BLOCK_SUMS), out, rows * hidden // 32, sums)


@compiled("void(int64, int64, int64, int64)")
def _attention_layer(sync: int, step: int, layer: int, scratch: int) -> None:
    """x += attention(norm(x)); K and V of the tokens are stored. Phases 0 to 5 of the layer."""
    model, first = ir.word(step, rec.MODEL), layer * rec.PHASES
    record = ir.word(model, rec.LAYER_RECORDS) + layer * rec.LAYER_WORDS * 8
    functions, rows, x = ir.word(model, rec.FUNCTIONS), ir.word(step, rec.TILED), ir.word(step, rec.X)
    product = ir.word(functions, rec.PRODUCT)
    sums, dot = scratch + ir.word(step, rec.SUMS) * 4, scratch + ir.word(step, rec.DOTS) * 4
    _normed(step, x, ir.word(record, rec.ATTN_NORM), scratch, sums)
    out, width = ir.word(step, rec.QKV), ir.word(step, rec.QKV_WIDTH)
    for i in range(3):
        matrix = record + i * rec.MATRIX_WORDS * 8
        ir.call_10(product, sync, first + i, matrix, scratch, sums, rows, dot, out, width, 0)
        out += ir.word(matrix, rec.ROWS) * 4
    for i in range(3):
        wait(sync, first + i, task_count(record + i * rec.MATRIX_WORDS * 8))
    angle, scores = scratch + ir.word(step, rec.ANGLES) * 4, scratch + ir.word(step, rec.SCORES) * 4
    wait(sync, first + 3, ir.call_5(ir.word(functions, rec.STORE), sync, first + 3, step, layer, angle))
    wait(sync, first + 4, ir.call_5(ir.word(functions, rec.ATTENTION), sync, first + 4, step, layer, scores))
    ir.call_3(ir.word(functions, rec.COMBINE), step, layer, scratch)
    wide, hidden = ir.word(model, rec.HEADS_PADDED), ir.word(model, rec.HIDDEN_PADDED)
    ir.call_3(ir.word(functions, rec.BLOCK_SUMS), scratch, rows * wide // 32, sums)
    o = record + rec.O * rec.MATRIX_WORDS * 8
    wait(sync, first + 5, ir.call_10(product, sync, first + 5, o, scratch, sums, rows, dot, x, hidden, 1))


@compiled("void(int64, int64, int64, int64)")
def _mlp_layer(sync: int, step: int, layer: int, scratch: int) -> None:
    """x += mlp(norm(x)). Phases 6 and 7 of the layer."""
    model, first = ir.word(step, rec.MODEL), layer * rec.PHASES
    record = ir.word(model, rec.LAYER_RECORDS) + layer * rec.LAYER_WORDS * 8
    functions, rows, x = ir.word(model, rec.FUNCTIONS), ir.word(step, rec.TILED), ir.word(step, rec.X)
    hidden, inner, act = ir.word(model, rec.HIDDEN_PADDED), ir.word(model, rec.INNER_PADDED), ir.word(step, rec.ACT)
    sums, dot = scratch + ir.word(step, rec.SUMS) * 4, scratch + ir.word(step, rec.DOTS) * 4
    _normed(step, x, ir.word(record, rec.MLP_NORM), scratch, sums)
    gate, up = record + rec.GATE * rec.MATRIX_WORDS * 8, record + rec.UP * rec.MATRIX_WORDS * 8
    gated, product = ir.word(functions, rec.GATED), ir.word(functions, rec.PRODUCT)
    wait(sync, first + 6, ir.call_10(gated, sync, first + 6, gate, up, scratch, sums, rows, dot, act, inner))
    ir.call_3(ir.word(functions, rec.BLOCK_SUMS), act, rows * inner // 32, sums)
    down = record + rec.DOWN * rec.MATRIX_WORDS * 8
    wait(sync, first + 7, ir.call_10(product, sync, first + 7, down, act, sums, rows, dot, x, hidden, 1))


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
        sums = scratch + ir.word(step, rec.SUMS) * 4
        _normed(step, ir.word(step, rec.X), ir.word(model, rec.NORM), ir.word(step, rec.OUT), sums)
