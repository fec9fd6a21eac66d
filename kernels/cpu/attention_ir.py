"""Vector code over cached rows: scores of query heads, and weighted sums of values, for all rows in 16 or 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

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
    plus,
    prefetch_line,
    splat,
    store,
    variable,
)
from kernels.cpu.kv_ir import SIZES, WIDE_KINDS, load_kv, padded, parts, rest

RUN_BYTES = 24  # three words (`_run`)
MAX_HEADS = 3  # that are scored together: four times as many sums fill the registers


def _sums_of_four(b: Any, vectors: list[Value]) -> Value:
    """The sum of each of four vectors, as a vector of 4: neighbours first, then fours, then these from both ends."""
    count = vectors[0].type.count

    def neighbours(x: Value, y: Value) -> Value:
        lanes = [
            ir.Constant(
                ir.VectorType(I32, count),
                [base + i for four in range(0, count, 4) for base in (four, count + four) for i in (odd, odd + 2)],
            )
            for odd in (0, 1)
        ]
        return b.fadd(*(b.shuffle_vector(x, y, lane) for lane in lanes))

    total = neighbours(neighbours(vectors[0], vectors[1]), neighbours(vectors[2], vectors[3]))
    while total.type.count > 4:
        half = total.type.count // 2
        lanes = [ir.Constant(ir.VectorType(I32, half), [first + i for i in range(half)]) for first in (0, half)]
        total = b.fadd(*(b.shuffle_vector(total, total, lane) for lane in lanes))
    return total


def _bring(b: Any, address: Value, size: int) -> None:
    for line in range(0, size, 64):
        prefetch_line(b, plus(b, address, line))


def _for_each_kind(b: Any, kind: Value, heads: Value, write: Callable[..., None], *values: Value) -> None:
    """Code for every kind of row and number of heads, of which one is run."""
    for one in WIDE_KINDS:
        for number in range(1, MAX_HEADS + 1):
            same = (
                b.icmp_signed("==", kind, ir.Constant(I64, one)),
                b.icmp_signed("==", heads, ir.Constant(I64, number)),
            )
            with b.if_then(b.and_(*same)):
                write(b, one, number, *values)


def _run(b: Any, runs: Value, index: Value) -> list[Value]:
    """A run of rows: where it begins, how many they are, and where what is fetched meanwhile begins."""
    return [load(b, plus(b, plus(b, runs, index, RUN_BYTES), 8 * i), I64, 8) for i in range(3)]


@emits("iiiiiiiiifiii")
def scores(b: Any, kind: Value, heads: Value, *values: Value) -> None:
    """out[g, i] = scale * q[g] · key i, for up to MAX_HEADS heads g. Arguments: out, bytes from one row of out to the
    next, q [heads, dim], runs of keys, their number, bytes from one key to the next, dim (a multiple of 8), scale; then
    for how many KV heads, rows of out and q from one of these to the next, bytes from its keys to the next one's."""
    *one, kv_heads, each, gap = values

    def write(
        b: Any, kind: int, heads: int, out: Value, line: Value, q: Value, runs: Value, number: Value, *others: Value
    ) -> None:
        stride, dim, scale = others
        place = variable(b, out)
        b.store(out, place)
        with cgutils.for_range(b, number, intp=I64) as loop:
            keys, count, ahead = _run(b, runs, loop.index)
            with cgutils.for_range(b, kv_heads, intp=I64) as kv:
                row = b.mul(kv.index, each)
                own_out, own_q = b.add(b.load(place), b.mul(row, line)), plus(b, q, b.mul(row, dim), 4)
                own_keys, near = b.add(keys, b.mul(kv.index, gap)), _share(b, ahead, kv.index, count, dim, kind)
                _scores(b, kind, heads, near, own_out, line, own_q, own_keys, count, stride, dim, scale)
            b.store(plus(b, b.load(place), count, 4), place)

    _for_each_kind(b, kind, heads, write, *one)


@emits("iiiiiiiiiiiii")
def accumulate(b: Any, kind: Value, heads: Value, *values: Value) -> None:
    """out[g] += sum over i of weights[g, i] * value i. Arguments: out, bytes from one row to the next, weights, bytes
    from one row to the next, runs of values, their number, bytes from one value to the next, dim; then for how many KV
    heads, rows of out and weights from one of these to the next, bytes from its values to the next one's."""
    *one, kv_heads, each, gap = values

    def write(
        b: Any, kind: int, heads: int, out: Value, out_line: Value, weights: Value, line: Value, *others: Value
    ) -> None:
        with cgutils.for_range(b, kv_heads, intp=I64) as kv:
            row = b.mul(kv.index, each)
            own_out, own_weights = b.add(out, b.mul(row, out_line)), b.add(weights, b.mul(row, line))
            before = b.mul(kv.index, gap)
            _accumulate(b, kind, heads, kv.index, before, own_out, out_line, own_weights, line, *others)

    _for_each_kind(b, kind, heads, write, *one)


def _share(b: Any, ahead: Value, kv: Value, count: Value, dim: Value, kind: int) -> Value:
    """Where the part begins of what comes next that is fetched while one KV head is worked on: as much as that reads.

    A processor can't guess where the next block lies, and has room for few lines that are on their way: all of them
    asked for at once would hold it up, so they are asked for one by one, between the sums.
    """
    return plus(b, ahead, b.mul(kv, b.mul(count, dim)), SIZES[kind])


def _scores(
    b: Any,
    kind: int,
    heads: int,
    ahead: Value,
    out: Value,
    line: Value,
    q: Value,
    keys: Value,
    count: Value,
    stride: Value,
    dim: Value,
    scale: Value,
) -> None:
    size = SIZES[kind]

    def some(first: Value, number: int) -> list[list[Value]]:
        totals = [[variable(b, constant(0.0, WIDE)) for _ in range(number)] for _ in range(heads)]
        for total in (total for row in totals for total in row):
            b.store(constant(0.0, WIDE), total)
        places = [b.add(keys, b.mul(b.add(first, ir.Constant(I64, i)), stride)) for i in range(number)]
        rows = [plus(b, q, b.mul(dim, ir.Constant(I64, g)), 4) for g in range(heads)]

        def add(channel: Value, load_query: Any, load_key: Any) -> None:
            queries = [load_query(plus(b, row, channel, 4)) for row in rows]
            for i, place in enumerate(places):
                key = load_key(plus(b, place, channel, size))
                for g, query in enumerate(queries):
                    b.store(fma(b, query, key, b.load(totals[g][i])), totals[g][i])

        with parts(b, dim, WIDTH) as channel:
            add(channel, lambda at: load(b, at, WIDE), lambda at: load_kv(b, at, kind, WIDTH))
            read = b.add(b.mul(first, dim), b.mul(channel, ir.Constant(I64, number)))
            _bring(b, plus(b, ahead, read, size), WIDTH * number * size)
        with rest(b, dim) as channel:
            add(channel, lambda at: padded(b, load(b, at, V8)), lambda at: padded(b, load_kv(b, at, kind)))
        return [[b.load(total) for total in row] for row in totals]

    fours = b.lshr(count, ir.Constant(I64, 2))
    with cgutils.for_range(b, fours, intp=I64) as loop:
        first = b.shl(loop.index, ir.Constant(I64, 2))
        for g, row in enumerate(some(first, 4)):
            sums = b.fmul(_sums_of_four(b, row), splat(b, scale, 4))
            store(b, sums, plus(b, plus(b, out, first, 4), b.mul(line, ir.Constant(I64, g))))
    left = b.and_(count, ir.Constant(I64, 3))
    with cgutils.for_range(b, left, intp=I64) as loop:
        index = b.add(b.shl(fours, ir.Constant(I64, 2)), loop.index)
        for g, row in enumerate(some(index, 1)):
            sums = b.fmul(_sums_of_four(b, row * 4), splat(b, scale, 4))
            value = b.extract_element(sums, ir.Constant(I32, 0))
            store(b, value, plus(b, plus(b, out, index, 4), b.mul(line, ir.Constant(I64, g))))


def _accumulate(
    b: Any,
    kind: int,
    heads: int,
    kv: Value,
    before: Value,
    out: Value,
    gap: Value,
    weights: Value,
    line: Value,
    runs: Value,
    number: Value,
    stride: Value,
    dim: Value,
) -> None:
    """Of KV head `kv`, whose values begin `before` bytes behind those of the first."""
    size = SIZES[kind]

    def columns(channel: Value, number_of: int, width: int) -> None:
        """So many vectors of `width` sums: those of one vector wait for each other, those of several do not."""
        lanes = ir.VectorType(F32, width)
        own = [b.add(channel, ir.Constant(I64, width * i)) for i in range(number_of)]
        places = [[b.add(plus(b, out, i, 4), b.mul(gap, ir.Constant(I64, g))) for i in own] for g in range(heads)]
        totals = [[variable(b, constant(0.0, lanes)) for _ in own] for _ in range(heads)]
        pairs = [pair for g in range(heads) for pair in zip(places[g], totals[g], strict=True)]
        for place, total in pairs:
            b.store(load(b, place, lanes), total)
        first = variable(b, weights)
        b.store(weights, first)
        with cgutils.for_range(b, number, intp=I64) as run:
            rows, count, ahead = _run(b, runs, run.index)
            near, rows = _share(b, ahead, kv, count, dim, kind), b.add(rows, before)
            with cgutils.for_range(b, count, intp=I64) as loop:
                row = b.add(rows, b.mul(loop.index, stride))
                values = [load_kv(b, plus(b, row, i, size), kind, width) for i in own]
                for g in range(heads):
                    at = b.add(plus(b, b.load(first), loop.index, 4), b.mul(line, ir.Constant(I64, g)))
                    weight = splat(b, load(b, at, F32), width)
                    for value, total in zip(values, totals[g], strict=True):
                        b.store(fma(b, weight, value, b.load(total)), total)
                read = b.add(b.mul(channel, count), b.mul(loop.index, ir.Constant(I64, width * number_of)))
                _bring(b, plus(b, near, read, size), width * number_of * size)
            b.store(plus(b, b.load(first), count, 4), first)
        for place, total in pairs:
            store(b, b.load(total), place)

    with parts(b, dim, 4 * WIDTH) as channel:
        columns(channel, 4, WIDTH)
    with parts(b, dim, WIDTH, 4 * WIDTH) as channel:
        columns(channel, 1, WIDTH)
    with rest(b, dim) as channel:
        columns(channel, 1, 8)
