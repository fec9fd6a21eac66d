"""The process's memory by part, measured piece by piece against its resident set, now and since the start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import KVScopeError
from engine.lane import Lane
from engine.memory import process as process_memory
from engine.memory.held_arrays import held_ranges
from engine.memory.process import Heap, Mapping, Range

WEIGHT_FILES = (".gguf", ".safetensors", ".bin")
FRESH_S = 4.0
"""A reading is not taken again sooner: it costs about 50 ms of one core, most of them the system's."""
TRIES = 3
STEADY = 0.005
"""Share of the resident set by which it and the C heap may move while the parts are read; else they are read again."""
EVERY_S = 5.0
MOST_POINTS = 360
HELD = ("weights", "kv", "states", "workspace")
SHOWN = ("rss", "weights", "kv", "python", "libraries", "buffers", "heap_free", "unexplained")


@dataclass(slots=True)
class Holdings:
    """Host memory of our own by kind: addresses and bytes, each storage in one kind."""

    kinds: dict[str, list[Range]] = field(default_factory=dict)

    @classmethod
    def of(cls, lanes: Iterable[Lane], weights: list[Range]) -> Holdings:
        """To be called on the engine thread. `weights`: those of `held_ranges(model.weights)`, which never change."""
        loops = list(lanes)
        parts, caches = loops[0].parts, [loop.parts.cache for loop in loops]
        kv = held_ranges([(cache.extents, cache.scale_extents) for cache in caches])
        states = held_ranges(parts.states)
        known = {*weights, *kv, *states}
        workspace = [one for one in held_ranges(caches, parts.model) if one not in known]
        return cls({"weights": weights, "kv": kv, "states": states, "workspace": workspace})


def measure(holdings: Holdings) -> dict[str, Any]:
    """`{rss, parts, unexplained, exact}` in bytes. `exact` is false where the system does not tell all parts, and then
    what it does not tell is in `unexplained`.

    Of our tensors what has memory behind it; of the C heap what is neither theirs nor free; of files what is mapped and
    resident, the model's apart. No part is made from the resident set, so `unexplained` may also be negative. The parts
    are read one after another while the app goes on: of `TRIES` readings the one during which least changed is taken.
    """
    best: dict[str, Any] = {}
    least = float("inf")
    for _ in range(TRIES):
        rss, heap = process_memory.resident_bytes(), _heap_bytes()
        reading = _read(holdings)
        moved = max(abs(reading["rss"] - rss), abs(_heap_bytes() - heap))
        if moved < least:
            best, least = reading, moved
        if moved <= STEADY * rss:
            break
    return best


def _heap_bytes() -> int:
    found = process_memory.heap()
    return 0 if found is None else found.used + found.mapped


def _read(holdings: Holdings) -> dict[str, Any]:
    parts = {kind: _touched(holdings.kinds.get(kind, [])) for kind in HELD}
    mapped, heap, objects = process_memory.mappings(), process_memory.heap(), process_memory.object_arenas()
    parts |= _of_mappings(mapped or [])
    parts["python"] = objects or 0
    held = sum(size for ranges in holdings.kinds.values() for _, size in ranges)
    parts["buffers"] = parts["heap_free"] = 0
    if heap is not None:
        parts["buffers"] = max(heap.used + heap.mapped - held, 0)
        parts["heap_free"] = _heap_free(heap, process_memory.arenas(mapped or []), holdings)
    exact = mapped is not None and heap is not None and objects is not None
    rss = process_memory.resident_bytes()
    return {"rss": rss, "parts": parts, "unexplained": rss - sum(parts.values()), "exact": exact}


def _heap_free(heap: Heap, arenas: list[Range], holdings: Holdings) -> int:
    """Resident bytes of the arenas that are handed out to nobody. What an arena has handed out to us and nobody has
    touched yet is not resident, but used."""
    ours = [one for ranges in holdings.kinds.values() for one in ranges if _is_within(one, arenas)]
    untouched = sum(size for _, size in ours) - _touched(ours)
    return min(max(_touched(arenas) + untouched - heap.used, 0), heap.free)


def _is_within(one: Range, arenas: list[Range]) -> bool:
    return any(start <= one[0] < start + size for start, size in arenas)


def _touched(ranges: list[Range]) -> int:
    found = process_memory.touched_bytes(ranges)
    return sum(size for _, size in ranges) if found is None else found


def _of_mappings(mapped: list[Mapping]) -> dict[str, int]:
    model = [one for one in mapped if Path(one.name).suffix in WEIGHT_FILES]
    files = [one for one in mapped if one.is_file and Path(one.name).suffix not in WEIGHT_FILES]
    code = [one for one in mapped if not one.is_file and ("x" in one.rights or one.name.startswith("[stack"))]
    return {
        "weights_file": sum(one.resident for one in model),
        "libraries": sum(one.resident for one in files),
        "compiled": sum(one.resident for one in code),
    }


class MemoryWatch:
    """The newest reading, and a history of the whole run in at most `MOST_POINTS` points: when it is full, every second
    one goes and the rest are taken half as often. Thread-safe."""

    def __init__(self, holdings: Callable[[], Holdings], every_s: float = EVERY_S) -> None:
        """`holdings` is asked before each reading; what it raises is `latest`'s to raise."""
        self._holdings = holdings
        self._lock = threading.Lock()
        self._every_s = every_s
        self._reading: dict[str, Any] = {}
        self._read_at = float("-inf")
        self._points: list[dict[str, Any]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvscope-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def latest(self) -> dict[str, Any]:
        """As `measure`, at most `FRESH_S` old."""
        with self._lock:
            if time.monotonic() - self._read_at >= FRESH_S:
                self._reading, self._read_at = measure(self._holdings()), time.monotonic()
            return self._reading

    def history(self) -> dict[str, Any]:
        """`{every_s, points}`; a point is `{at, rss, ...}`: bytes of what is drawn, `at` in seconds since 1970."""
        with self._lock:
            return {"every_s": self._every_s, "points": list(self._points)}

    def note(self, reading: dict[str, Any]) -> None:
        """Add a point."""
        figures = {"rss": reading["rss"], "unexplained": reading["unexplained"], **reading["parts"]}
        point = {"at": round(time.time(), 1), **{name: figures[name] for name in SHOWN}}
        with self._lock:
            self._points.append(point)
            if len(self._points) > MOST_POINTS:
                del self._points[1::2]
                self._every_s *= 2

    def _watch(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self.note(self.latest())
            except (KVScopeError, TimeoutError):
                # The engine is busy or has just stopped: the history has a gap.
                continue
