"""How the CPU kernels are compiled, where the result is kept, and the threads that run it together."""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from numba.core import types

from kernels.cpu.records import SYNC_BYTES

MAX_THREADS = 8
FAIR_SHARE = 0.8  # of a call that a thread must have been running for
SHORTEST_CALL_S = 1e-3  # below, the share says nothing
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 64  # calls without other threads
_FOLDER = "cpu-kernels-"


def is_supported() -> bool:
    """x86 needs fused multiply-add and float16 conversion in hardware (AVX2 and F16C), ARM has them."""
    features = llvmlite.binding.get_host_cpu_features()
    triple = llvmlite.binding.get_process_triple()
    return triple.startswith(("aarch64", "arm64")) or all(features.get(name) for name in ("avx2", "fma", "f16c"))


def _cache_folder() -> Path | None:
    """A folder named after the sources, since numba's own check sees only the file that a function stands in."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(here.glob("*.py")):
        digest.update(source.read_bytes())
    name = _FOLDER + digest.hexdigest()[:16]
    for parent in (here / "__pycache__", Path.home() / ".cache" / "kvscope"):
        with suppress(OSError, RuntimeError):
            folder = parent / name
            if not folder.is_dir():
                folder.mkdir(parents=True)
                for old in parent.glob(_FOLDER + "*"):
                    if old != folder:
                        shutil.rmtree(old, ignore_errors=True)
            if os.access(folder, os.W_OK):
                return folder
    return None


_CACHE = _cache_folder()


def is_cached() -> bool:
    """Whether an earlier start has left compiled kernels behind."""
    return _CACHE is not None and any(_CACHE.rglob("*.nbc"))


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile for one signature, now, or load what is kept. Sums may be reordered; NaN and infinity stay."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}

    def compile_now(function: Callable[..., Any]) -> Any:
        config: Any = numba.config
        kept = config.CACHE_DIR
        if _CACHE is not None:
            config.CACHE_DIR = str(_CACHE)
        try:
            return numba.njit(signature, cache=_CACHE is not None, **options)(function)
        finally:
            config.CACHE_DIR = kept

    return compile_now


if os.name == "posix":
    yield_processor = types.ExternalFunction("sched_yield", types.int32())
else:

    @compiled("int32()")
    def yield_processor() -> int:
        """Windows threads just go on looking."""
        return 0


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
