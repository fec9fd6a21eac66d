"""Attention in splits of SPLIT keys: weights within a split, and what follows when a split joins those before it.

Single tokens and tiles do the same sums in the same order, so how many tokens a step takes changes no bit.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu import ir as ir
from kernels.cpu import tile_ir
from kernels.cpu.compile import compiled

MINUS_INFINITY = np.float32(-np.inf)


@compiled("void(int64, int64, int64)")
def soften(line: int, count: int, pair: int) -> None:
    """Scores [count], a multiple of 8, into exp(score - largest); largest and the sum of these into `pair`."""
    largest = tile_ir.largest(line, count)
    ir.put(pair, 0, largest)
    if largest == MINUS_INFINITY:
        ir.put(pair, 1, np.float32(0.0))
        for i in range(count):
            ir.put(line, i, np.float32(0.0))
    else:
        ir.put(pair, 1, ir.exp_sum(line, count, largest))


@compiled("void(int64, int64, int64, int64, int64)")
def join(out: int, pair: int, part: int, part_pair: int, dim: int) -> None:
    """A split's sum of values [dim], with its largest score and sum of weights, onto that of the splits before it."""
    before, own = ir.get(pair, 0), ir.get(part_pair, 0)
    if own == MINUS_INFINITY:
        return
    largest = max(before, own)
    other = np.float32(math.exp(min(before, own) - largest))
    keep, take = (other, np.float32(1.0)) if own > before else (np.float32(1.0), other)
    ir.put(pair, 0, largest)
    ir.put(pair, 1, ir.get(pair, 1) * keep + ir.get(part_pair, 1) * take)
    tile_ir.blend(out, part, dim, keep, take)


@compiled("void(int64, int64, int64)")
def begin(out: int, pair: int, dim: int) -> None:
    """No split so far."""
    for i in range(dim):
        ir.put(out, i, np.float32(0.0))
    ir.put(pair, 0, MINUS_INFINITY)
    ir.put(pair, 1, np.float32(0.0))
