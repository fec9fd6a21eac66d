"""Prints readings of the process's memory, JSON by name, beside arenas of threads: as it is, with pages of nobody, with
pages of nobody that look like an arena, with tensors that were never written, in an arena, and with a tensor that is
told of and one that is not."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.memory.held_arrays import held_ranges
from engine.memory.process import ARENA
from engine.memory.watch import Holdings, measure

SIZE = 40 * 2**20


@contextmanager
def arenas_of_threads(count: int = 3) -> Iterator[None]:
    done, filled = threading.Event(), threading.Barrier(count + 1)

    def fill() -> None:
        kept = [bytearray(20_000 + number) for number in range(1000)]
        filled.wait()
        done.wait()
        kept.clear()

    threads = [threading.Thread(target=fill) for _ in range(count)]
    for thread in threads:
        thread.start()
    filled.wait()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


@contextmanager
def pages_of_nobody(like_an_arena: bool) -> Iterator[None]:
    """`SIZE` bytes, written. An arena begins at a multiple of `ARENA` and is followed by pages without rights."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    reserved = libc.mmap(None, 3 * ARENA, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    start = -(-reserved // ARENA) * ARENA + (0 if like_an_arena else mmap.PAGESIZE)
    libc.mprotect(start, SIZE, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.memset(start, 1, SIZE)
    try:
        yield
    finally:
        libc.munmap(reserved, 3 * ARENA)


def untouched_in_an_arena() -> list[torch.Tensor]:
    """`SIZE` bytes in all, each few enough for an arena; those of a thread begin empty."""
    made: list[torch.Tensor] = []
    size = 100_000
    thread = threading.Thread(
        target=lambda: made.extend(torch.empty(size, dtype=torch.uint8) for _ in range(SIZE // size))
    )
    thread.start()
    thread.join()
    return made


def main() -> None:
    with arenas_of_threads():
        gc.collect()
        measure(Holdings())  # what measuring itself takes is there before
        readings = {"before": measure(Holdings())}
        for name, like_an_arena in (("nobody", False), ("look_alike", True)):
            with pages_of_nobody(like_an_arena):
                readings[name] = measure(Holdings())
        readings["untouched"] = measure(Holdings({"kv": held_ranges(untouched_in_an_arena())}))
        tensor = torch.ones(SIZE // 4)
        readings["known"] = measure(Holdings({"kv": held_ranges(tensor)}))
        readings["unknown"] = measure(Holdings())
    print(json.dumps(readings))


if __name__ == "__main__":
    main()
