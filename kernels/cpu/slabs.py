"""Arrays side by side in large pieces of memory, which numpy asks the system to back by huge pages.

A step reads all weights once, and a matrix alone is smaller than a few huge pages: with ordinary ones a third of the
time goes into address translations.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SLAB = 16 * 2**20
LINE = 64  # bytes


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """An array that begins with a cache line: a wide load across two of them takes twice as long."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + LINE, np.uint8)
    first = -room.ctypes.data % LINE
    return room[first : first + size].view(dtype).reshape(shape)


class Slabs:
    """Gives out parts of the newest slab, which is freed with the last of them."""

    def __init__(self) -> None:
        self._newest: weakref.ref[Bytes] | None = None
        self._used = 0

    def take(self, *shape: int) -> Bytes:
        """A uint8 array of any content that begins with a cache line."""
        size = math.prod(shape)
        if size > SLAB // 4:
            return aligned_zeros(shape, np.uint8)
        slab = None if self._newest is None else self._newest()
        if slab is None or self._used + size > len(slab):
            slab = np.empty(SLAB, np.uint8)
            self._newest, self._used = weakref.ref(slab), -slab.ctypes.data % LINE
        first, self._used = self._used, self._used + -(-size // LINE) * LINE
        return slab[first : first + size].reshape(shape)
