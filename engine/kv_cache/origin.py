"""Where the K and V of a cached position came from. A byte per position, kept by its sequence."""

from __future__ import annotations

from enum import IntEnum


class Origin(IntEnum):
    """`PREFILL`, `DECODE`: computed for this sequence, with the prompt or one by one as the reply grew. `SNAPSHOT`:
    kept on disk or in RAM meanwhile. `SHARED`: in blocks of the tree, from another session or an earlier turn."""

    PREFILL = 0
    DECODE = 1
    SNAPSHOT = 2
    SHARED = 3
