"""The threads that run a compiled CPU kernel together."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np
import torch

from kernels.cpu.records import SYNC_BYTES

MAX_THREADS = 8
FAIR_SHARE = 0.8  # of a call that a thread must have been running for
SHORTEST_CALL_S = 1e-3  # below, the share says nothing
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 64  # calls without other threads


class Team:
    """Threads that join a compiled call. The caller starts at once and finishes alone if none of them comes in time.

    Where other programs want the processors, a thread that is stopped in the middle of a task holds the others up. So a
    thread that got less than its share of a call sends the caller on alone for a while, longer each time.
    """

    def __init__(self, size: int) -> None:
        self._alone = 0
        self._pause = SHORTEST_PAUSE
        self._queues: list[queue.SimpleQueue[tuple[Any, tuple[int, ...], Any]]] = []
        for i in range(size - 1):
            jobs: queue.SimpleQueue[tuple[Any, tuple[int, ...], Any]] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(jobs,), name=f"kvscope-cpu-{i + 1}", daemon=True).start()
            self._queues.append(jobs)

    @property
    def size(self) -> int:
        return len(self._queues) + 1

    def run(self, function: Any, phases: int, arguments: tuple[int, ...], alive: Any) -> None:
        """function(sync, *arguments, thread) on every thread; back once the work is done.

        `sync` belongs to this call alone, so a thread that is still held up in an earlier one can do no harm; `alive`
        is what the addresses among the arguments point into, kept until the last thread has left.
        """
        sync = np.zeros(phases * SYNC_BYTES // 8, np.int64)
        arguments = (sync.ctypes.data, *arguments)
        if self._alone > 0:
            self._alone -= 1
        else:
            for i, jobs in enumerate(self._queues, 1):
                jobs.put((function, (*arguments, i), (sync, alive)))
        function(*arguments, 0)

    def _work(self, jobs: queue.SimpleQueue[tuple[Any, tuple[int, ...], Any]]) -> None:
        while True:
            function, arguments, alive = jobs.get()
            wall, own = time.perf_counter(), time.thread_time()
            function(*arguments)
            wall, own = time.perf_counter() - wall, time.thread_time() - own
            if wall > SHORTEST_CALL_S:
                if own < FAIR_SHARE * wall:
                    self._alone, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
                else:
                    self._pause = max(self._pause - 1, SHORTEST_PAUSE)
            del function, arguments, alive


# Read at import: the engine later takes torch down to one thread for small steps.
_THREADS = min(torch.get_num_threads(), MAX_THREADS)
_team: Team | None = None


def team() -> Team:
    """The process's threads, as many as torch uses at first, at most MAX_THREADS."""
    global _team
    if _team is None:
        _team = Team(_THREADS)
    return _team
