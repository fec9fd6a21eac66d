"""The process's memory by part: parts found one by one add up to what the system says, and what is in none shows."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import EngineBusy
from engine.memory import process as process_memory
from engine.memory import watch as memory_watch
from engine.memory.held_arrays import held_ranges
from engine.memory.ledger import card_parts
from engine.memory.watch import Holdings, MemoryWatch, measure
from tests.support.engines import tiny_engine
from tests.support.fake_engine import wait_until

ROOT = Path(__file__).parents[2]
MIB = 2**20
TOLD = process_memory.mappings() is not None and process_memory.heap() and process_memory.object_arenas()
needs_linux = pytest.mark.skipif(not TOLD, reason="the system does not tell all parts")


def readings_of(script: str) -> list[Any]:
    command = [sys.executable, "-m", f"tests.support.{script}"]
    child = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return [json.loads(line) for line in child.stdout.splitlines()]


@needs_linux
def test_parts_add_up_to_the_resident_set_before_and_after_a_turn():
    """In a process of its own: this one has held whatever other tests in it have left behind."""
    before, after = readings_of("memory_turn")
    for reading in (before, after):
        assert reading["exact"]
        assert abs(reading["unexplained"]) <= 0.02 * reading["rss"], reading
    assert after["parts"]["kv"] > 0 and after["parts"]["weights"] > 0


@needs_linux
def test_memory_of_nobody_is_unexplained_and_what_is_held_is_in_its_part():
    """Guards the sum against being right by definition: pages that no source knows of must appear as such, and those
    that look like an arena of the C heap and are none, too. In a process of its own as well."""
    [readings], size = readings_of("memory_of_nobody"), 40 * MIB
    before = readings["before"]
    assert abs(before["unexplained"]) <= 0.02 * before["rss"], before
    # An arena has handed them out, and they are told of: that they were never written must not count twice.
    assert readings["untouched"]["unexplained"] - before["unexplained"] == pytest.approx(0, abs=4 * MIB)
    for name in ("nobody", "look_alike"):
        assert readings[name]["unexplained"] - before["unexplained"] == pytest.approx(size, abs=4 * MIB), name
    known, unknown = readings["known"], readings["unknown"]
    assert known["parts"]["kv"] == size
    assert unknown["parts"]["buffers"] - known["parts"]["buffers"] == pytest.approx(size, abs=4 * MIB)


@needs_linux
def test_only_pages_that_were_written_count():
    # From the system and not from an allocator, which may hand out what was used before.
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.write(b"x" * (3 * MIB))
        array = np.frombuffer(pages, np.uint8)
        touched = process_memory.touched_bytes([(array.ctypes.data, array.nbytes)])
        del array
    assert 3 * MIB <= touched <= 5 * MIB  # the system may back the beginning with a page of 2 MiB


def test_arenas_are_found_in_several_mappings_and_in_one_with_a_neighbour(monkeypatch):
    """The system tells of neighbours with the same rights as one mapping, and of others as two."""
    arena, page = process_memory.ARENA, 4096
    sizes = {5 * arena: 520 * page, 6 * arena: arena, 7 * arena: 8 * page}
    monkeypatch.setattr(process_memory, "arena_size", lambda address: sizes.get(address, 0))

    def found(*parts, rights="rw-p", name=""):
        mapped = [process_memory.Mapping(start, end, rights, name, end - start) for start, end in parts]
        return sum(size for _, size in process_memory.arenas(mapped))

    middle, end = 5 * arena + 8 * page, 5 * arena + 520 * page
    assert found((5 * arena, end)) == found((5 * arena, middle), (middle, end)) == 520 * page
    assert found((4 * arena + page, end)) == found((5 * arena, end + page)) == 520 * page
    assert found((6 * arena, 7 * arena + 8 * page)) == arena + 8 * page
    assert found((5 * arena, middle)) == 520 * page, "it has grown since"
    assert found((5 * arena + page, 6 * arena)) == 0
    assert found((5 * arena, end), name="/a/file") == found((5 * arena, end), rights="---p") == 0
    assert found((page, 8 * page), name="[heap]") == 7 * page


@needs_linux
def test_an_arena_is_told_by_what_it_says_of_itself():
    """Pages with zeros, other content or no rights are none, wherever they begin."""
    with mmap.mmap(-1, 2 * process_memory.ARENA, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        array = np.frombuffer(pages, np.uint8)
        address = -(-array.ctypes.data // process_memory.ARENA) * process_memory.ARENA
        assert process_memory.arena_size(address) == 0
        array[:] = 1
        assert process_memory.arena_size(address) == 0
        del array
    assert process_memory.arena_size(0) == 0


def test_each_storage_counts_once_and_views_of_files_not_at_all(tmp_path):
    whole, array = torch.zeros(1000), np.zeros(500, np.uint8)
    file = tmp_path / "blocks"
    file.write_bytes(bytes(4096))
    with file.open("rb") as opened:
        mapped = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    found = held_ranges({"a": [whole[:10], whole], "b": (array[3:], whole.numpy())}, mapped)
    assert found == sorted([(whole.data_ptr(), 4000), (array.ctypes.data, 500)])


def test_where_the_system_tells_nothing_the_remainder_says_so(monkeypatch):
    for name in ("mappings", "heap", "object_arenas", "touched_bytes"):
        monkeypatch.setattr(process_memory, name, lambda *_: None)
    reading = measure(Holdings({"weights": [(4096, 1000)]}))
    assert not reading["exact"] and reading["parts"]["weights"] == 1000
    assert reading["unexplained"] == reading["rss"] - 1000


@pytest.mark.parametrize(
    ("resident", "heaps", "taken"),
    [
        ([1000, 1003], [0] * 3, 1003),
        ([1000, 1100, 1100, 1104], [0] * 6, 1104),
        ([1000, 1001, 1002, 1003], [300, 500, 400, 400, 400, 400], 1003),
        ([1000, 1100, 1100, 1130, 1130, 1200], [0] * 9, 1130),
    ],
)
def test_a_reading_during_which_memory_changed_is_taken_again(monkeypatch, resident, heaps, taken):
    told, used = iter(resident), iter(heaps)
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: next(told))
    monkeypatch.setattr(process_memory, "heap", lambda: process_memory.Heap(next(used), 0, 0))
    assert memory_watch.measure(Holdings())["rss"] == taken
    assert list(told) == list(used) == [], "and no more often than that"


def test_history_keeps_the_whole_run_in_so_many_points(monkeypatch):
    monkeypatch.setattr(memory_watch, "MOST_POINTS", 8)
    watch, parts = MemoryWatch(Holdings), dict.fromkeys(set(memory_watch.SHOWN) - {"rss", "unexplained"}, 0)
    for rss in range(100):
        watch.note({"rss": rss, "unexplained": 0, "parts": parts})
    told = watch.history()
    sizes = [point["rss"] for point in told["points"]]
    assert len(sizes) <= 8 and sizes[0] == 0 and sizes == sorted(sizes) and sizes[-1] >= 98
    assert told["every_s"] > memory_watch.EVERY_S


def test_history_is_taken_by_itself_and_survives_a_busy_engine():
    answers = iter([Holdings(), EngineBusy("busy"), Holdings()])

    def holdings() -> Holdings:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    watch = MemoryWatch(holdings, every_s=0.01)
    watch.start()
    try:
        assert wait_until(lambda: bool(watch.history()["points"]))
        watch._read_at = float("-inf")
        count = len(watch.history()["points"])
        assert wait_until(lambda: len(watch.history()["points"]) > count)
    finally:
        watch.stop()


def test_a_cards_parts_add_up_to_what_the_driver_says():
    device = {"total": 1000, "free": 300, "process": 600, "reserved": 450, "allocated": 420}
    parts = card_parts(device, own=400)
    assert parts == {"own": 400, "buffers": 20, "allocator_free": 30, "context": 150, "process": 600}
    hidden = card_parts({**device, "process": 450}, own=400)  # where NVML does not tell of processes
    assert hidden["context"] == 0


def test_without_a_card_there_are_no_parts_of_one():
    engine = tiny_engine()
    try:
        report = engine.memory()
    finally:
        engine.close()
    assert report["card"] is None and set(report["process"]["parts"]) >= {"weights", "kv", "python", "libraries"}
