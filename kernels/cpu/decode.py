"""A step through layers as one compiled call, shared by the threads that happen to be there.

Work is cut into phases (a matrix product, attention, ...) and each phase into tasks that threads draw by ticket. A
phase is over when its tasks are done, not when every thread has come by: a thread that the system keeps away holds
nobody up unless it was in the middle of a task, and one that comes late finds the tickets gone and walks through. All
threads run the same function. Products sum whole numbers within a block, everything else float32, and a token's result
does not depend on other sequences in the batch.
"""

from __future__ import annotations

from kernels.cpu import ir as ir
from kernels.cpu import records as rec
from kernels.cpu.compile import by_address, compiled
from kernels.cpu.ends import embed, finish_step
from kernels.cpu.product import task_count
from kernels.cpu.store import angles
from kernels.cpu.tickets import finished, wait


@compiled("void(int64, int64, int64, int64, int64)")
def _attention_layer(sync: int, phase: int, step: int, layer: int, scratch: int) -> None:
    """x += attention(norm(x)); K and V of the tokens are stored."""
    model, tokens, rows = ir.word(step, rec.MODEL), ir.word(step, rec.TOKENS), ir.word(step, rec.ROWS)
    record = ir.word(model, rec.LAYER_RECORDS) + layer * rec.LAYER_WORDS * 8
    functions, work = ir.word(model, rec.FUNCTIONS), scratch + ir.word(step, rec.WORK) * 4
    product, own = ir.word(functions, rec.PRODUCT), phase + rec.ATTN_NORMED
    wait(sync, own, ir.call_5(ir.word(functions, rec.NORMED), sync, own, step, ir.word(record, rec.ATTN_NORM), work))
    out, width = ir.word(step, rec.QKV), ir.word(step, rec.QKV_WIDTH)
    for i in range(3):
        matrix = record + i * rec.MATRIX_WORDS * 8
        ir.call_9(product, sync, phase + rec.Q_DONE + i, matrix, rows, tokens, work, out, width, 0)
        out += ir.word(matrix, rec.ROWS_OUT) * 4
    for i in range(3):
        wait(sync, phase + rec.Q_DONE + i, task_count(record + i * rec.MATRIX_WORDS * 8))
    wait(
        sync,
        phase + rec.STORED,
        ir.call_5(ir.word(functions, rec.STORE), sync, phase + rec.STORED, step, layer, scratch),
    )
    own = phase + rec.ATTENDED
    wait(sync, own, ir.call_5(ir.word(functions, rec.ATTENTION), sync, own, step, layer, work))
    own = phase + rec.COMBINED
    wait(sync, own, ir.call_5(ir.word(functions, rec.COMBINED_ROWS), sync, own, step, layer, work))
    o, x, hidden = record + rec.O * rec.MATRIX_WORDS * 8, ir.word(step, rec.X), ir.word(model, rec.HIDDEN)
    own = phase + rec.O_DONE
    wait(sync, own, ir.call_9(product, sync, own, o, rows, tokens, work, x, hidden, 1))


@compiled("void(int64, int64, int64, int64, int64)")
def _mlp_layer(sync: int, phase: int, step: int, layer: int, scratch: int) -> None:
    """x += mlp(norm(x))."""
    model, tokens, rows = ir.word(step, rec.MODEL), ir.word(step, rec.TOKENS), ir.word(step, rec.ROWS)
    record = ir.word(model, rec.LAYER_RECORDS) + layer * rec.LAYER_WORDS * 8
    functions, work = ir.word(model, rec.FUNCTIONS), scratch + ir.word(step, rec.WORK) * 4
    own = phase + rec.MLP_NORMED
    wait(sync, own, ir.call_5(ir.word(functions, rec.NORMED), sync, own, step, ir.word(record, rec.MLP_NORM), work))
    gate, up = record + rec.GATE * rec.MATRIX_WORDS * 8, record + rec.UP * rec.MATRIX_WORDS * 8
    own, act = phase + rec.GATED_DONE, ir.word(step, rec.ACT)
    wait(sync, own, ir.call_8(ir.word(functions, rec.GATED), sync, own, gate, up, rows, tokens, work, act))
    down, x, hidden = record + rec.DOWN * rec.MATRIX_WORDS * 8, ir.word(step, rec.X), ir.word(model, rec.HIDDEN)
    own = phase + rec.DOWN_DONE
    wait(sync, own, ir.call_9(ir.word(functions, rec.PRODUCT), sync, own, down, act, tokens, work, x, hidden, 1))


@by_address(5)
def decode(sync: int, step: int, first: int, last: int, thread: int) -> int:
    """Layers first:last over X; before the first of all X is made, after the last of all OUT and LOGITS are."""
    model = ir.word(step, rec.MODEL)
    scratch = ir.word(step, rec.SCRATCH) + thread * ir.word(step, rec.SCRATCH_BYTES)
    angles(step, scratch)
    if first == 0 and ir.word(step, rec.TOKEN_IDS):
        embed(sync, step, scratch)
    for layer in range(first, last):
        phase = rec.END_PHASES + (layer - first) * rec.PHASES
        down = ir.word(model, rec.LAYER_RECORDS) + (layer * rec.LAYER_WORDS + rec.DOWN * rec.MATRIX_WORDS) * 8
        if finished(sync, phase + rec.DOWN_DONE) < task_count(down):
            _attention_layer(sync, phase, step, layer, scratch)
            _mlp_layer(sync, phase, step, layer, scratch)
    if last == ir.word(model, rec.LAYERS):
        finish_step(sync, step, scratch)
    return 0
