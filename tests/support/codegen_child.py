"""Compiles all kernels for all cards in a process of its own, beside the tests that come before the ones that ask.

A process of its own because the tests' may be interpreting; with low priority because minutes of compiling must not
slow down what is tested meanwhile.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from typing import IO, Any

from tests.kernels import build_kernels
from tests.support.compile_only import ARCHS

NICENESS = 15
Rows = dict[str, dict[str, Any]]


@cache
def start() -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Begin, if that was not done before; the process and the file that takes what it prints."""
    output = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe would stop the child when it is full)
    command = [sys.executable, "-m", "tests.kernels.build_kernels", *map(str, ARCHS)]
    if os.name == "posix":
        command = ["nice", "-n", str(NICENESS), *command]
    child = subprocess.Popen(command, cwd=build_kernels.ROOT, stdout=output, stderr=subprocess.STDOUT)
    atexit.register(child.kill)
    return child, output


def rows() -> Rows:
    """What `tests.kernels.build_kernels` says of every kernel on every card, once it is done."""
    child, output = start()
    code = child.wait()
    output.seek(0)
    text = output.read().decode()
    assert code == 0, text[-4000:]
    found: Rows = json.loads(text.splitlines()[-1])
    return found
