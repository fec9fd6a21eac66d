"""The threads that run a compiled CPU kernel together."""

from __future__ import annotations

import os
import threading
import time
import weakref
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

    The threads end with the team, and at the latest with the interpreter.
    """

    def __init__(self, size: int) -> None:
        self._alone = 0
        self._pause = SHORTEST_PAUSE
        self._seen = [0] * (size - 1)
        self._others = _Others(size - 1)
        weakref.finalize(self, self._others.end)

    @property
    def size(self) -> int:
        return len(self._seen) + 1

    def run(self, kernel: Any, phases: int, arguments: tuple[int, int, int], alive: Any) -> None:
        """kernel(sync, *arguments, thread) on every thread; back once the work is done.

        `sync` belongs to this call alone, so a thread that is still held up in an earlier one can do no harm; `alive`
        is what the addresses among the arguments point into, kept until the last thread has left.
        """
        sync = np.zeros(phases * SYNC_BYTES // 8, np.int64)
        self._others.join(kernel, sync, arguments, alive, alone=self._goes_alone())

    def _goes_alone(self) -> bool:
        if self._alone > 0:
            self._alone -= 1
            return True
        for i, box in enumerate(self._others.boxes):
            left, wall, own = int(box[tw.LEFT]), int(box[tw.WALL_NS]), int(box[tw.OWN_NS])
            if left != self._seen[i] and wall > SHORTEST_CALL_NS:
                if own < FAIR_SHARE * wall:
                    self._alone, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
                else:
                    self._pause = max(self._pause - 1, SHORTEST_PAUSE)
            self._seen[i] = left
        return self._alone > 0


class _Others:
    """A team's threads but for its caller, and what they read: it stays until the last of them has ended."""

    def __init__(self, count: int) -> None:
        self.boxes = np.zeros((count, tw.MAILBOX_WORDS), np.int64)
        self._calling, self._letting_go = threading.Lock(), threading.Lock()
        self._alive: deque[tuple[list[int], Any]] = deque()
        for i, box in enumerate(self.boxes):
            box[tw.THREAD], (box[tw.READ_FD], box[tw.WRITE_FD]) = i + 1, os.pipe()
        self._threads = [
            threading.Thread(target=self._work, args=(box,), name=f"kvscope-cpu-{i + 1}", daemon=True)
            for i, box in enumerate(self.boxes)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, kernel: Any, sync: Any, arguments: tuple[int, int, int], alive: Any, *, alone: bool) -> None:
        """Run a call with those that come, or `alone`."""
        with self._calling:
            count = 0 if alone else len(self._threads)
            if not tw.WAKES:
                self._wake(count)
            tw.lead(self.boxes.ctypes.data, count, kernel.address, sync.ctypes.data, *arguments)
            if count:
                self._alive.append((self.boxes[:, tw.SENT].tolist(), (sync, kernel, alive)))
                self._let_go()

    def end(self) -> None:
        """Each thread ends once it has left the call it is in; later calls are run by the caller alone."""
        with self._calling:
            # After a fork a child has the descriptors and not the threads.
            threads, self._threads = [thread for thread in self._threads if thread.is_alive()], []
            self.boxes[:, tw.ENDS] = 1
            self._wake(len(threads))
            for thread in threads:
                thread.join()
            for descriptor in self.boxes[:, [tw.READ_FD, tw.WRITE_FD]].flatten().tolist():
                os.close(descriptor)

    def _wake(self, count: int) -> None:
        for box in self.boxes[:count]:
            os.write(int(box[tw.WRITE_FD]), b"\0")

    def _let_go(self) -> None:
        """Of what calls needed whose last thread has left. Most leave with the caller; one that is held up lets go
        itself of what it still needs."""
        until = time.perf_counter() + LEAVING_S
        while self._drop():
            if time.perf_counter() > until:
                # A thread may leave while it is asked, so look again: the lock within orders the two.
                self._drop(ask=True)
                self._drop()
                return

    def _drop(self, ask: bool = False) -> bool:
        """What no thread needs any more; whether something is left. `ask` the threads in question to drop it."""
        with self._letting_go:
            left = self.boxes[:, tw.LEFT].tolist()
            while self._alive and all(own >= sent for own, sent in zip(left, self._alive[0][0], strict=True)):
                self._alive.popleft()
            if ask and self._alive:
                self.boxes[:, tw.AWAITED] = [own < sent for own, sent in zip(left, self._alive[-1][0], strict=True)]
            return bool(self._alive)

    def _work(self, box: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        while not box[tw.ENDS]:
            if tw.WAKES:
                tw.serve(box.ctypes.data)
            else:
                os.read(int(box[tw.READ_FD]), 1)
                tw.take(box.ctypes.data)
            if box[tw.AWAITED]:
                box[tw.AWAITED] = 0
                self._drop(ask=True)


# Read at import: the engine later takes torch down to one thread for small steps.
_THREADS = min(torch.get_num_threads(), MAX_THREADS)
_team: Team | None = None


def team() -> Team:
    """The process's threads, as many as torch uses at first, at most MAX_THREADS."""
    global _team
    if _team is None:
        _team = Team(_THREADS)
    return _team
