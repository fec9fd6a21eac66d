"""Asks the system to back a large tensor by huge pages: a long cache is read in fewer address translations."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

HUGE = 2 * 2**20


@cache
def _madvise() -> Any:
    """The C library's, None where there is none."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def ask_for_huge_pages(tensor: Tensor) -> None:
    """For those parts of a fresh tensor on the host that are whole huge pages; what is refused stays as it is."""
    madvise, start = _madvise(), -(-tensor.data_ptr() // HUGE) * HUGE
    length = (tensor.data_ptr() + tensor.nbytes - start) // HUGE * HUGE
    if madvise is not None and tensor.device.type == "cpu" and length > 0:
        madvise(start, length, mmap.MADV_HUGEPAGE)
