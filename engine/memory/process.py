"""What the system says of this process's memory: mapped files, heap, Python's objects, pages that are really there.

Each figure comes from another source, so that a ledger made of them can be wrong, and shows by how much. On systems
that do not tell a figure it is None.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import psutil

PAGE = mmap.PAGESIZE
ARENA = 64 * 2**20
_ARENA_HEADER = struct.Struct("4Q")
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *([^\n]*)\n(?:\w+: [^\n]*\n)*?Rss: +(\d+) kB",
    re.MULTILINE,
)
_ARENAS = re.compile(r"^\d+ arenas \* \d+ bytes/arena\s*=\s*([\d,]+)", re.MULTILINE)
_PRESENT = np.uint64(1 << 63)
Range = tuple[int, int]
"""Address and bytes."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Addresses `start : end`, with `rights` as in "rw-p". `name`: a file's path, "[heap]" or the like, or empty."""

    start: int
    end: int
    rights: str
    name: str
    resident: int

    @property
    def is_file(self) -> bool:
        return self.name.startswith("/")


@dataclass(frozen=True, slots=True)
class Heap:
    """Bytes that the C allocator has handed out, of its arenas and as mappings of their own, and those of its arenas
    that it has not."""

    used: int
    mapped: int
    free: int


def resident_bytes() -> int:
    """The process's resident set."""
    return int(psutil.Process().memory_info().rss)


def mappings() -> list[Mapping] | None:
    """All of the process's."""
    try:
        with open("/proc/self/smaps", "rb") as file:
            text = file.read()
    except OSError:
        return None
    return [
        Mapping(int(start, 16), int(end, 16), rights.decode(), os.fsdecode(name), 1024 * int(rss))
        for start, end, rights, name, rss in _MAPPING.findall(text)
    ]


def arenas(mapped: SequenceOf[Mapping]) -> list[Range]:
    """The C heap's: "[heap]", and those of its threads.

    Of these less may be there than they have handed out or hold free: never touched, or given back. The system tells
    of an arena as several mappings where huge pages were asked for in the middle, and as one with neighbours that have
    the same rights; so neighbours are taken together, and each arena is told by what it says of itself. It may by now
    reach further than `mapped` tells: that of this thread grows while the answer is taken apart.
    """
    found = [(one.start, one.end - one.start) for one in mapped if one.name == "[heap]"]
    for start, end in _stretches(mapped):
        for first in range(-(-start // ARENA) * ARENA, end, ARENA):
            if size := arena_size(first):
                found.append((first, size))
    return found


def _stretches(mapped: SequenceOf[Mapping]) -> list[Range]:
    """Start and end of neighbouring mappings that are of no file and can be written."""
    found: list[Range] = []
    for one in mapped:
        if one.name == "" and one.rights == "rw-p":
            joined = bool(found) and found[-1][1] == one.start
            found[-1 if joined else len(found) :] = [(found[-1][0] if joined else one.start, one.end)]
    return found


def arena_size(address: int) -> int:
    """Bytes in use of the arena that begins here, 0 where none does: glibc's `heap_info`, malloc/arena.c."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            # Not through a pointer: another thread may have given the address back meanwhile.
            arena, previous, size, writable = _ARENA_HEADER.unpack(
                os.pread(memory.fileno(), _ARENA_HEADER.size, address)
            )
    except (OSError, struct.error):
        return 0
    # The first part of an arena holds the arena itself, later ones name the part before.
    linked = previous % ARENA == 0 and arena % 16 == 0 and (address < arena < address + ARENA or previous > 0)
    return writable if linked and 0 < size <= writable <= ARENA and writable % PAGE == 0 else 0


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def heap() -> Heap | None:
    """Of the C library's allocator: libraries, large Python objects, tensors and arrays on the host."""
    try:
        mallinfo = _libc().mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    mallinfo.restype = _MallInfo
    found = mallinfo()
    return Heap(found.uordblks, found.hblkhd, found.fordblks)


def trim_heap() -> None:
    """Give free pages of the C heap back to the system, where its allocator can."""
    with suppress(AttributeError, OSError, TypeError):
        _libc().malloc_trim(0)


def object_arenas() -> int | None:
    """Bytes that Python's allocator of small objects has taken; only its own report tells."""
    try:
        write, open_stream = ctypes.pythonapi._PyObject_DebugMallocStats, _libc().open_memstream
    except (AttributeError, OSError, TypeError):
        return None
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    open_stream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(open_stream(ctypes.byref(text), ctypes.byref(size)))
    if not stream:
        return None
    write(stream)
    _libc().fclose(stream)
    found = _ARENAS.search((text.value or b"").decode("ascii", "replace"))
    _libc().free(text)
    return int(found[1].replace(",", "")) if found else None


def touched_bytes(ranges: Iterable[Range]) -> int | None:
    """How much of these addresses has memory behind it: what was allocated and never written has none."""
    total = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            for address, nbytes in ranges:
                total += _touched(file, address, nbytes) if nbytes else 0
    except OSError:
        return None
    return total


def _touched(file: Any, address: int, nbytes: int) -> int:
    first, last = address // PAGE, (address + nbytes - 1) // PAGE
    file.seek(8 * first)
    entries = np.frombuffer(file.read(8 * (last - first + 1)), np.uint64)
    present = (entries & _PRESENT) != 0
    pages = int(present.sum()) * PAGE
    if len(present) and present[0]:
        pages -= address - first * PAGE
    if len(present) and present[-1]:
        pages -= (last + 1) * PAGE - (address + nbytes)
    return pages
