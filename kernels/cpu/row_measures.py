"""What is asked of a row of logits at every token, in two passes over it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import tile_ir
from kernels.cpu.compile import compiled

if TYPE_CHECKING:  # torch takes a second, which a process that only compiles can do without
    from torch import Tensor


@compiled("float32(int64, int64)", from_python=True)
def _finite(values: int, count: int) -> float:
    whole = count // ir.WIDTH * ir.WIDTH
    found = ir.zero_or_nan(values, whole)
    for i in range(whole, count):
        found += ir.get(values, i) * np.float32(0.0)
    return found


@compiled("void(int64, int64, int64, int64)", from_python=True)
def _survey(values: int, count: int, chosen: int, out: int) -> None:
    """out float32 [4]: as `ir.survey`, then the value of `chosen` less the largest."""
    whole = count // ir.WIDTH * ir.WIDTH
    largest, mine = tile_ir.largest(values, whole), ir.get(values, chosen)
    for i in range(whole, count):
        largest = max(largest, ir.get(values, i))
    ir.survey(values, whole, largest, mine, out)
    for i in range(whole, count):
        shifted = ir.get(values, i) - largest
        weight = np.float32(math.exp(shifted))
        ir.put(out, 0, ir.get(out, 0) + weight)
        ir.put(out, 1, ir.get(out, 1) + weight * shifted)
        if ir.get(values, i) > mine:
            ir.put(out, 2, ir.get(out, 2) + np.float32(1.0))
    ir.put(out, 3, mine - largest)


def all_finite(row: Tensor) -> bool:
    """Of contiguous float32 of any shape."""
    return bool(_finite(row.data_ptr(), row.numel()) == 0.0)


def measures(row: Tensor, chosen: int) -> tuple[float, int, float, float]:
    """Of finite contiguous float32 [V]: as `kernels.reference.row_measures`."""
    out = np.empty(4, np.float32)
    _survey(row.data_ptr(), row.numel(), chosen, out.ctypes.data)
    total, weighted, above, mine = (float(value) for value in out)
    return mine - math.log(total), int(above), max(math.log(total) - weighted / total, 0.0), 1.0 / total
