"""Vector code for attention: small float32 matrix products, and weighted sums of splits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from kernels.cpu.ir import (
    F32,
    I64,
    V8,
    WIDE,
    WIDTH,
    Value,
    constant,
    emits,
    fma,
    load,
    max_of,
    plus,
    splat,
    store,
    variable,
)

ROWS, COLUMNS = 6, 2 * WIDTH  # of a product that is held in registers: twelve sums, two rows of b, a value of a


@emits("iiiiiiii")
def multiply(
    b: Any,
    a: Value,
    a_stride: Value,
    right: Value,
    right_stride: Value,
    out: Value,
    out_stride: Value,
    depth: Value,
    add: Value,
) -> None:
    """out [6, COLUMNS] = add * out + a [6, depth] · right [depth, COLUMNS]; float32, strides in bytes."""
    old = b.icmp_signed("!=", add, ir.Constant(I64, 0))
    sums = [[variable(b, constant(0.0, WIDE)) for _ in range(2)] for _ in range(ROWS)]
    places = [
        [plus(b, b.add(out, b.mul(out_stride, ir.Constant(I64, r))), 4 * WIDTH * c) for c in range(2)]
        for r in range(ROWS)
    ]
    for row, addresses in zip(sums, places, strict=True):
        for total in row:
            b.store(constant(0.0, WIDE), total)
        with b.if_then(old):
            for total, address in zip(row, addresses, strict=True):
                b.store(load(b, address, WIDE), total)
    rows = [b.add(a, b.mul(a_stride, ir.Constant(I64, r))) for r in range(ROWS)]
    with cgutils.for_range(b, depth, intp=I64) as loop:
        line = b.add(right, b.mul(right_stride, loop.index))
        values = [load(b, plus(b, line, 4 * WIDTH * c), WIDE) for c in range(2)]
        for row, address in zip(sums, rows, strict=True):
            factor = splat(b, load(b, plus(b, address, loop.index, 4), F32), WIDTH)
            for total, value in zip(row, values, strict=True):
                b.store(fma(b, factor, value, b.load(total)), total)
    for row, addresses in zip(sums, places, strict=True):
        for total, address in zip(row, addresses, strict=True):
            store(b, b.load(total), address)


@emits("ii", types.float32)
def largest(b: Any, values: Value, count: Value) -> Value:
    """Of float32 [count], a multiple of WIDTH; -infinity of none. NaN may be passed over."""
    most = variable(b, constant(float("-inf"), WIDE))
    b.store(constant(float("-inf"), WIDE), most)
    with cgutils.for_range(b, b.udiv(count, ir.Constant(I64, WIDTH)), intp=I64) as loop:
        value = load(b, plus(b, values, loop.index, 4 * WIDTH), WIDE)
        b.store(b.select(b.fcmp_ordered(">", value, b.load(most)), value, b.load(most)), most)
    return max_of(b, b.load(most))


@emits("iiiff")
def blend(b: Any, out: Value, other: Value, count: Value, keep: Value, take: Value) -> None:
    """float32 out [count] = out * keep + other * take, `count` a multiple of 8."""
    with cgutils.for_range(b, b.lshr(count, ir.Constant(I64, 3)), intp=I64) as loop:
        place = plus(b, out, loop.index, 32)
        kept = b.fmul(load(b, place, V8), splat(b, keep, 8))
        store(b, fma(b, load(b, plus(b, other, loop.index, 32), V8), splat(b, take, 8), kept), place)


@emits("iif")
def scale(b: Any, values: Value, count: Value, factor: Value) -> None:
    """float32 [count] *= factor, `count` a multiple of 8."""
    with cgutils.for_range(b, b.lshr(count, ir.Constant(I64, 3)), intp=I64) as loop:
        place = plus(b, values, loop.index, 32)
        store(b, b.fmul(load(b, place, V8), splat(b, factor, 8)), place)
