"""What every benchmark prints alike: medians with their spread, the machine, and one JSON line last."""

from __future__ import annotations

import json
import platform
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

Case = TypeVar("Case")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.4g} .. {max(values):.4g}"


def machine() -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [[str(value) for value in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())


def print_json(name: str, result: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": name, **machine(), **result}))


def until(cases: Iterator[Case], limit_s: float | None) -> Iterator[Case]:
    """The cases, until `limit_s` seconds are over, or Ctrl-C or SIGTERM comes: what has been run by then is kept."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.perf_counter()
    try:
        for case in cases:
            yield case
            if limit_s is not None and time.perf_counter() - began >= limit_s:
                print(f"Stopped after {limit_s:g} s.", flush=True)
                return
    except KeyboardInterrupt:
        print("Interrupted.", flush=True)
