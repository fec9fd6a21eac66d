"""Tasks of a phase, drawn by the threads that work on a call; and waiting for the last of them."""

from __future__ import annotations

from kernels.cpu import ir as ir
from kernels.cpu import records as rec
from kernels.cpu.compile import compiled, yield_processor

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
