"""Files that are whole or not there, also when the process or the machine stops in mid-write."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TEMPORARY = ".tmp-"


def write_durably(path: Path, data: bytes) -> None:
    """Write under a temporary name, sync, rename, sync the folder. Raises OSError; the old file then stays."""
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have names that came or went survive a power cut. Windows does it by itself and opens no folders."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
