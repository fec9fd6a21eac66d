"""Mapped files and the memory they take."""

from __future__ import annotations

import mmap


def release_pages(data: mmap.mmap) -> None:
    """Drop the pages that reading has brought in, where the system lets us; the mapping stays."""
    if hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED)
