"""What stands before and behind a model's layers: tokens' embeddings, the last norm, the head."""

from __future__ import annotations

from kernels.cpu import ir as ir
from kernels.cpu import panel_ir
from kernels.cpu import records as rec
from kernels.cpu.compile import compiled
from kernels.cpu.product import task_count
from kernels.cpu.tickets import draw, finish, wait


@compiled("void(int64, int64, int64)")
def matrix_row(matrix: int, row: int, out: int) -> None:
    """A row of a matrix as float32 [columns padded to 32], without the matrix's factor."""
    fmt, blocks = ir.word(matrix, rec.FORMAT), ir.word(matrix, rec.BLOCKS)
    panel = ir.word(matrix, rec.ADDRESS) + row // panel_ir.PANEL * ir.word(matrix, rec.PANEL_BYTES)
    if fmt == ir.Q4_1:
        panel_ir.row_q4_1(panel, blocks, row % panel_ir.PANEL, out)
    elif fmt == ir.Q8_0:
        panel_ir.row_q8_0(panel, blocks, row % panel_ir.PANEL, out)
    else:
        panel_ir.row_q4_0(panel, blocks, row % panel_ir.PANEL, out)


@compiled("void(int64, int64, int64)")
def embed(sync: int, step: int, scratch: int) -> None:
    """X from TOKEN_IDS."""
    model, tokens = ir.word(step, rec.MODEL), ir.word(step, rec.TOKENS)
    hidden, work = ir.word(model, rec.HIDDEN), scratch + ir.word(step, rec.WORK) * 4
    task = draw(sync, rec.EMBEDDED)
    while task < tokens:
        matrix_row(ir.word(model, rec.EMBEDDING), ir.word(ir.word(step, rec.TOKEN_IDS), task), work)
        for i in range(hidden):
            ir.put(ir.word(step, rec.X) + task * hidden * 4, i, ir.get(work, i))
        finish(sync, rec.EMBEDDED)
        task = draw(sync, rec.EMBEDDED)
    wait(sync, rec.EMBEDDED, tokens)


@compiled("void(int64, int64, int64)")
def finish_step(sync: int, step: int, scratch: int) -> None:
    """OUT = the last norm of X, and LOGITS of what OUT holds for LOGIT_ROWS."""
    model, tokens, count = ir.word(step, rec.MODEL), ir.word(step, rec.TOKENS), ir.word(step, rec.LOGIT_COUNT)
    hidden, functions = ir.word(model, rec.HIDDEN), ir.word(model, rec.FUNCTIONS)
    rows, work = ir.word(step, rec.ROWS), scratch + ir.word(step, rec.WORK) * 4
    task = draw(sync, rec.LAST_NORMED)
    while task < tokens:
        x, out = ir.word(step, rec.X) + task * hidden * 4, ir.word(step, rec.OUT) + task * hidden * 4
        norm, scalars = ir.word(model, rec.NORM), ir.word(model, rec.SCALARS)
        ir.call_5(ir.word(functions, rec.NORM_ROW), x, norm, scalars, hidden, out)
        finish(sync, rec.LAST_NORMED)
        task = draw(sync, rec.LAST_NORMED)
    wait(sync, rec.LAST_NORMED, tokens)
    task = draw(sync, rec.HEAD_ROWS)
    while task < count:
        source = ir.word(step, rec.OUT) + ir.word(ir.word(step, rec.LOGIT_ROWS), task) * hidden * 4
        ir.call_6(ir.word(functions, rec.QUANTISE_ROW), source, hidden, work, rows, rec.tiled(count), task)
        finish(sync, rec.HEAD_ROWS)
        task = draw(sync, rec.HEAD_ROWS)
    wait(sync, rec.HEAD_ROWS, count)
    if count:
        head, run = ir.word(model, rec.HEAD), ir.word(functions, rec.PRODUCT)
        out, vocabulary = ir.word(step, rec.LOGITS), ir.word(head, rec.ROWS_OUT)
        ir.call_9(run, sync, rec.HEAD_DONE, head, rows, count, work, out, vocabulary, 0)
        wait(sync, rec.HEAD_DONE, task_count(head))
