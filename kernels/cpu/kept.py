"""Where compiled CPU kernels are kept, and child processes that compile them while the app still starts.

Nothing here imports numba or torch: a start asks it first of all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

_PREFIX = "cpu-kernels-"
PARTS = {"attention": "attention", "others": "decode, row_measures, teamwork"}
"""Modules that are compiled side by side, in about the same time. What both import is compiled twice: numba puts a
function's file in place as a whole, so it does not matter whose stays."""
_children: list[subprocess.Popen[bytes]] = []


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
    """Whether earlier starts have compiled everything."""
    kept = folder()
    return kept is not None and all((kept / part).exists() for part in PARTS)


def mark_complete(parts: Iterable[str] = tuple(PARTS)) -> None:
    """Note that these are compiled."""
    kept = folder()
    if kept is not None:
        with suppress(OSError):
            for part in parts:
                (kept / part).touch()


def compile_ahead() -> None:
    """Begin to compile in processes of their own what is not kept yet. Python's lock keeps threads from it."""
    kept = folder()
    if kept is None or _children:
        return
    for part, modules in PARTS.items():
        if not (kept / part).exists():
            with suppress(OSError):
                _children.append(_begin(part, modules))


def _begin(part: str, modules: str) -> subprocess.Popen[bytes]:
    # Nothing it makes is garbage before it ends.
    code = f"import gc; gc.disable(); from kernels.cpu import {modules}, kept; kept.mark_complete(['{part}'])"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_children() -> None:
    """Until what `compile_ahead` began has ended. Where it failed, whoever needs a kernel compiles it and sees why."""
    for child in _children:
        child.wait()
