"""Time on a card: events, replayed graphs, a cold L2 cache; on a CPU, where only the script is checked, the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.common import median

Run = Callable[[], object]
ROUND_MS = 150.0
"""About how long one round of one kernel may take."""
FEW, MANY = 3, 40
"""Repetitions in a round."""


class Budget:
    """Seconds for the whole run; what does not fit any more is named, not begun."""

    def __init__(self, seconds: float, skipped: list[str] | None = None) -> None:
        self._end = time.perf_counter() + seconds
        self.skipped = [] if skipped is None else skipped

    def part(self, share: float) -> Budget:
        """A share of what is left; both note what is skipped in one list."""
        return Budget(share * self.left, self.skipped)

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def allows(self, what: str, seconds: float) -> bool:
        """Whether there is time for `what`, which takes about `seconds`; else it is noted as skipped."""
        if self.left >= seconds:
            return True
        self.skipped.append(f"{what}: no time left")
        return False

    def skip(self, what: str, reason: str) -> None:
        self.skipped.append(f"{what}: {reason}")

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """What fails inside is noted; compilers, drivers and libraries have errors of their own."""
        try:
            yield
        except Exception as failure:
            self.skip(what, " ".join(str(failure).split())[:160] or type(failure).__name__)


class Timer:
    """Milliseconds on one device. Everything it times must have run before: compiled, and its memory allocated."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self._spoiler: Tensor | None = None
        if device.type == "cuda":
            l2 = torch.cuda.get_device_properties(device).L2_cache_size
            # Also long enough for the host to queue what comes next meanwhile.
            self._spoiler = torch.empty(max(2 * l2, 2**27), dtype=torch.uint8, device=device)

    def queued(self, run: Run, count: int) -> float:
        """Of one of `count` runs that wait for nothing but each other."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(count):
                run()
            return 1e3 * (time.perf_counter() - start) / count
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / count

    def cold(self, runs: Mapping[str, Run]) -> dict[str, list[float]]:
        """Each run's median per round with a flushed L2 cache, the runs taking turns."""
        counts = {name: self._repetitions(run) for name, run in runs.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():
                found[name].append(median(self._cold_round(run, counts[name])))
        return found

    def _repetitions(self, run: Run) -> int:
        if self.device.type != "cuda":
            return 1
        return min(max(int(ROUND_MS / max(self.queued(run, 2), 1e-3)), FEW), MANY)

    def _cold_round(self, run: Run, count: int) -> list[float]:
        if self._spoiler is None:
            return [self.queued(run, 1) for _ in range(count)]
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for first, last in pairs:
            self._spoiler.zero_()
            first.record()
            run()
            last.record()
        torch.cuda.synchronize(self.device)
        return [float(first.elapsed_time(last)) for first, last in pairs]


def captured(device: torch.device, run: Run) -> Run:
    """`run` warmed up, and on a card as a graph: a launch costs the host next to nothing, as in the engine."""
    if device.type != "cuda":
        run()
        return run
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_bandwidth(timer: Timer, nbytes: int) -> list[float]:
    """Bytes per second, read and written together, of copies of `nbytes`; one figure per round."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    target.copy_(source)
    return [2e3 * nbytes / timer.queued(lambda: target.copy_(source), 5) for _ in range(timer.rounds)]


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now; without a card as much as a small one has."""
    if device.type != "cuda":
        return 2**32
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
