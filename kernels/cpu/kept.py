"""Where compiled CPU kernels are kept, and a child process that compiles them while the app still starts.

Nothing here imports numba or torch: a start asks it first of all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

_PREFIX = "cpu-kernels-"
_COMPLETE = "complete"
_child: subprocess.Popen[bytes] | None = None


@cache
def folder() -> Path | None:
    """A folder named after the sources, since numba's own check sees only the file that a function stands in."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(here.glob("*.py")):
        digest.update(source.read_bytes())
    name = _PREFIX + digest.hexdigest()[:16]
    for parent in (here / "__pycache__", Path.home() / ".cache" / "kvscope"):
        with suppress(OSError, RuntimeError):
            found = parent / name
            if not found.is_dir():
                found.mkdir(parents=True)
                for old in parent.glob(_PREFIX + "*"):
                    if old != found:
                        shutil.rmtree(old, ignore_errors=True)
            if os.access(found, os.W_OK):
                return found
    return None


def is_complete() -> bool:
    """Whether an earlier start has compiled everything."""
    kept = folder()
    return kept is not None and (kept / _COMPLETE).exists()


def mark_complete() -> None:
    kept = folder()
    if kept is not None:
        with suppress(OSError):
            (kept / _COMPLETE).touch()


def compile_ahead() -> None:
    """Begin to compile in a process of its own, unless that was done before. Python's lock keeps threads from it."""
    global _child
    if folder() is None or is_complete() or _child is not None:
        return
    with suppress(OSError):
        _child = subprocess.Popen(
            [sys.executable, "-c", "from kernels.cpu import decode, kept, row_measures, teamwork; kept.mark_complete()"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def wait_for_child() -> None:
    """Until what `compile_ahead` began has ended. Where it failed, whoever needs a kernel compiles it and sees why."""
    if _child is not None:
        _child.wait()
