"""Vector code for attention: small float32 matrix products, and weighted sums of splits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from kernels.cpu.ir import (
    F32,
    I32,
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
from kernels.cpu.kv_ir import padded, parts, rest

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


def _turned(b: Any, rows: list[Value]) -> list[Value]:
    """As many vectors as they have lanes, with rows and lanes exchanged."""
    count, step = len(rows), 1
    lanes = range(count)
    while step < count:
        low = ir.Constant(ir.VectorType(I32, count), [count + j - step if j & step else j for j in lanes])
        high = ir.Constant(ir.VectorType(I32, count), [count + j if j & step else j + step for j in lanes])
        for i in (i for i in lanes if not i & step):
            pair = rows[i], rows[i + step]
            rows[i], rows[i + step] = b.shuffle_vector(*pair, low), b.shuffle_vector(*pair, high)
        step *= 2
    return rows


@emits("iiiiii")
def turn(b: Any, rows: Value, gap: Value, count: Value, dim: Value, out: Value, line: Value) -> None:
    """out [dim, count] = rows [count, dim] turned, float32, `line` and `gap` bytes apart; count a multiple of WIDTH."""
    with cgutils.for_range(b, b.udiv(count, ir.Constant(I64, WIDTH)), intp=I64) as loop:
        first = b.mul(loop.index, ir.Constant(I64, WIDTH))
        places = [b.add(rows, b.mul(gap, b.add(first, ir.Constant(I64, i)))) for i in range(WIDTH)]

        def put(channel: Value, vectors: list[Value], wanted: int) -> None:
            for i, vector in enumerate(_turned(b, vectors)[:wanted]):
                target = b.add(out, b.mul(line, b.add(channel, ir.Constant(I64, i))))
                store(b, vector, plus(b, target, first, 4))

        with parts(b, dim, WIDTH) as channel:
            put(channel, [load(b, plus(b, place, channel, 4), WIDE) for place in places], WIDTH)
        with rest(b, dim) as channel:
            put(channel, [padded(b, load(b, plus(b, place, channel, 4), V8)) for place in places], 8)


@emits("iiiiiiifi")
def score(
    b: Any,
    queries: Value,
    gap: Value,
    keys: Value,
    line: Value,
    out: Value,
    out_line: Value,
    dim: Value,
    scale: Value,
    room: Value,
) -> None:
    """out [6, COLUMNS] = scale * queries [6, dim] · turned keys [dim, COLUMNS]; float32, strides in bytes.

    Summed as `attention_ir` does: WIDTH sums of every WIDTH-th product, for which there is `room`, then sums of
    neighbours, of these, and of halves."""
    size, number = 4 * WIDTH, 2 * ROWS
    rows = [b.add(queries, b.mul(gap, ir.Constant(I64, r))) for r in range(ROWS)]
    sums = [variable(b, constant(0.0, WIDE)) for _ in range(number)]

    def add(channel: Value) -> None:
        own = b.add(keys, b.mul(line, channel))
        values = [load(b, plus(b, own, size * c), WIDE) for c in range(2)]
        for r, row in enumerate(rows):
            factor = splat(b, load(b, plus(b, row, channel, 4), F32), WIDTH)
            for total, value in zip(sums[2 * r : 2 * r + 2], values, strict=True):
                b.store(fma(b, factor, value, b.load(total)), total)

    with cgutils.for_range(b, ir.Constant(I64, WIDTH), intp=I64) as lane:
        for total in sums:
            b.store(constant(0.0, WIDE), total)
        with parts(b, dim, WIDTH) as channel:
            add(b.add(channel, lane.index))
        if WIDTH > 8:
            with b.if_then(b.icmp_signed("<", lane.index, ir.Constant(I64, 8))), rest(b, dim) as channel:
                add(b.add(channel, lane.index))
        for i, total in enumerate(sums):
            store(b, b.load(total), plus(b, plus(b, room, lane.index, number * size), size * i))

    def tree(place: Value, lanes: list[int]) -> Value:
        if len(lanes) == 1:
            return load(b, plus(b, place, lanes[0] * number * size), WIDE)
        half = len(lanes) // 2
        # With a flag of its own a sum does not get those that let LLVM change the order.
        return b.fadd(tree(place, lanes[:half]), tree(place, lanes[half:]), flags=["nsz"])

    fours = sorted(range(0, WIDTH, 4), key=lambda four: (four // 4 % (WIDTH // 8), four))
    lanes = [four + i for four in fours for i in range(4)]
    with cgutils.for_range(b, ir.Constant(I64, ROWS), intp=I64) as row:
        for c in range(2):
            total = tree(plus(b, plus(b, room, row.index, 2 * size), c * size), lanes)
            target = plus(b, b.add(out, b.mul(out_line, row.index)), c * size)
            store(b, b.fmul(total, splat(b, scale, WIDTH)), target)


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
