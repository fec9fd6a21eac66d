"""What a call is shared with: jobs left in the mailboxes of other threads, and how these take them.

None of it needs Python's lock, so no thread waits for another one that holds it.
"""

from __future__ import annotations

import os
import time
from typing import Any

from numba.core import types

from kernels.cpu import ir as ir
from kernels.cpu.compile import compiled, yield_processor

JOBS = 8  # that a mailbox holds; a thread that is further behind gets no more
JOB_WORDS = 5  # a kernel's address and its arguments but for the thread
# A mailbox: the thread's number, descriptors of the pipe that wakes it, jobs sent and left, nanoseconds that the last
# job took and that the thread ran of these, whether Python waits for it to leave a job, whether it shall end, room for
# two words, then the jobs.
THREAD, READ_FD, WRITE_FD, SENT, LEFT, WALL_NS, OWN_NS, AWAITED, ENDS, ROOM = range(10)
FIRST_JOB = ROOM + 2
MAILBOX_WORDS = FIRST_JOB + JOBS * JOB_WORDS
WAKES = os.name == "posix"
"""Whether mailboxes wake their threads themselves; elsewhere Python writes to the pipe, and reads from it."""

if WAKES:
    _read: Any = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
    _write: Any = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))
    _clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
    _WALL, _OWN = time.CLOCK_MONOTONIC, time.CLOCK_THREAD_CPUTIME_ID

    @compiled("void(int64)")
    def _sleep(box: int) -> None:
        while _read(ir.word(box, READ_FD), box + ROOM * 8, 1) != 1:
            yield_processor()

    @compiled("void(int64)")
    def _wake(box: int) -> None:
        _write(ir.word(box, WRITE_FD), box, 1)

    @compiled("int64(int64, int64)")
    def _nanoseconds(clock: int, room: int) -> int:
        _clock_gettime(clock, room)
        return ir.word(room, 0) * 1000000000 + ir.word(room, 1)
else:
    _WALL = _OWN = 0

    @compiled("void(int64)")
    def _sleep(box: int) -> None:
        """Python has waited already."""

    @compiled("void(int64)")
    def _wake(box: int) -> None:
        """Python does."""

    @compiled("int64(int64, int64)")
    def _nanoseconds(clock: int, room: int) -> int:
        return 0


@compiled("void(int64)", from_python=True)
def take(box: int) -> None:
    """Wait for a job and do it, or for the end."""
    _sleep(box)
    left, room = ir.word(box, LEFT), box + ROOM * 8
    while ir.load_acquire(box + SENT * 8) == left:
        if ir.load_acquire(box + ENDS * 8) != 0:
            return
        yield_processor()
    job = box + (FIRST_JOB + left % JOBS * JOB_WORDS) * 8
    wall, own = _nanoseconds(_WALL, room), _nanoseconds(_OWN, room)
    ir.call_5(ir.word(job, 0), ir.word(job, 1), ir.word(job, 2), ir.word(job, 3), ir.word(job, 4), ir.word(box, THREAD))
    ir.put_word(box, WALL_NS, _nanoseconds(_WALL, room) - wall)
    ir.put_word(box, OWN_NS, _nanoseconds(_OWN, room) - own)
    ir.fetch_add(box + LEFT * 8, 1)


@compiled("void(int64)", from_python=True)
def serve(box: int) -> None:
    """A thread's life, but for what it does in Python when it is awaited there after a job, or ends."""
    take(box)
    while ir.load_acquire(box + AWAITED * 8) == 0 and ir.load_acquire(box + ENDS * 8) == 0:
        take(box)


@compiled("void(int64, int64, int64, int64, int64, int64, int64)", from_python=True)
def lead(boxes: int, count: int, kernel: int, sync: int, a: int, b: int, c: int) -> None:
    """Share a call of `kernel` with `count` threads, and do it as thread 0."""
    for i in range(count):
        box = boxes + i * MAILBOX_WORDS * 8
        sent = ir.word(box, SENT)
        if sent - ir.load_acquire(box + LEFT * 8) < JOBS:
            job = box + (FIRST_JOB + sent % JOBS * JOB_WORDS) * 8
            ir.put_word(job, 0, kernel)
            ir.put_word(job, 1, sync)
            ir.put_word(job, 2, a)
            ir.put_word(job, 3, b)
            ir.put_word(job, 4, c)
            ir.fetch_add(box + SENT * 8, 1)
            _wake(box)
    ir.call_5(kernel, sync, a, b, c, 0)
