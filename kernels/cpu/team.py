"""The threads that run a compiled CPU kernel together."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import torch

from kernels.cpu import teamwork as tw
from kernels.cpu.records import SYNC_BYTES

MAX_THREADS = 8
FAIR_SHARE = 0.8  # of a call that a thread must have been running for
SHORTEST_CALL_NS = 1_000_000  # below, the share says nothing
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 64  # calls without other threads
LEAVING_S = 100e-6  # that a call waits for threads which are on their way out of it


class Team:
    """Threads that join a compiled call. The caller starts at once and finishes alone if none of them comes in time.

    Where other programs want the processors, a thread that is stopped in the middle of a task holds the others up. So a
    thread that got less than its share of a call sends the caller on alone for a while, longer each time.
    """

    def __init__(self, size: int) -> None:
        self._alone = 0
        self._pause = SHORTEST_PAUSE
        self._boxes = np.zeros((size - 1, tw.MAILBOX_WORDS), np.int64)
        self._seen = [0] * (size - 1)
        self._alive: deque[tuple[list[int], Any]] = deque()
        for i, box in enumerate(self._boxes):
            box[tw.THREAD], (box[tw.READ_FD], box[tw.WRITE_FD]) = i + 1, os.pipe()
            threading.Thread(target=_work, args=(box,), name=f"kvscope-cpu-{i + 1}", daemon=True).start()

    @property
    def size(self) -> int:
        return len(self._boxes) + 1

    def run(self, kernel: Any, phases: int, arguments: tuple[int, int, int], alive: Any) -> None:
        """kernel(sync, *arguments, thread) on every thread; back once the work is done.

        `sync` belongs to this call alone, so a thread that is still held up in an earlier one can do no harm; `alive`
        is what the addresses among the arguments point into, kept until the last thread has left.
        """
        sync = np.zeros(phases * SYNC_BYTES // 8, np.int64)
        count = 0 if self._goes_alone() else len(self._boxes)
        if not tw.WAKES:
            for box in self._boxes[:count]:
                os.write(int(box[tw.WRITE_FD]), b"\0")
        tw.lead(self._boxes.ctypes.data, count, kernel.address, sync.ctypes.data, *arguments)
        if count:
            self._alive.append((self._boxes[:, tw.SENT].tolist(), (sync, kernel, alive)))
            self._let_go()

    def _goes_alone(self) -> bool:
        if self._alone > 0:
            self._alone -= 1
            return True
        for i, box in enumerate(self._boxes):
            left, wall, own = int(box[tw.LEFT]), int(box[tw.WALL_NS]), int(box[tw.OWN_NS])
            if left != self._seen[i] and wall > SHORTEST_CALL_NS:
                if own < FAIR_SHARE * wall:
                    self._alone, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
                else:
                    self._pause = max(self._pause - 1, SHORTEST_PAUSE)
            self._seen[i] = left
        return self._alone > 0

    def _let_go(self) -> None:
        """Of what calls needed whose last thread has left. Most leave with the caller; what one that was held up still
        needs stays until the next call."""
        until = time.perf_counter() + LEAVING_S
        while self._alive:
            sent, _ = self._alive[0]
            if all(left >= own for left, own in zip(self._boxes[:, tw.LEFT].tolist(), sent, strict=True)):
                self._alive.popleft()
            elif time.perf_counter() > until:
                return


def _work(box: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    if tw.WAKES:
        tw.serve(box.ctypes.data)
    while True:
        os.read(int(box[tw.READ_FD]), 1)
        tw.take(box.ctypes.data)


# Read at import: the engine later takes torch down to one thread for small steps.
_THREADS = min(torch.get_num_threads(), MAX_THREADS)
_team: Team | None = None


def team() -> Team:
    """The process's threads, as many as torch uses at first, at most MAX_THREADS."""
    global _team
    if _team is None:
        _team = Team(_THREADS)
    return _team
