"""Rows of the KV cache as vector code: scores and weighted sums over 16 and 32 bit rows, and rows in fewer bits.

A row is one head of one token. The quantised formats are those of `kernels.kv_format`; their rows are unpacked to
float32 before they are used, once for all query heads that share them. `dim` is a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    V8,
    WIDE,
    WIDTH,
    Value,
    constant,
    emits,
    fma,
    llvm_call,
    load,
    plus,
    prefetch_line,
    splat,
    store,
    variable,
)

FP32, FP16, BF16, INT8, FP8, INT4 = range(6)
WIDE_KINDS = (FP32, FP16, BF16)
SIZES = (4, 2, 2)
MAX_HEADS = 3  # that are scored together: four times as many sums fill the registers
GROUP = 32  # channels that share a step and a minimum in int4
INTS, BYTES = ir.VectorType(I32, 8), ir.VectorType(I8, 8)


def _load_kv(b: Any, address: Value, kind: int, count: int = 8) -> Value:
    """`count` numbers of a row, as float32."""
    floats, ints = ir.VectorType(F32, count), ir.VectorType(I32, count)
    if kind == FP32:
        return load(b, address, floats)
    if kind == FP16:
        return b.fpext(load(b, address, ir.VectorType(F16, count)), floats)
    upper = b.zext(load(b, address, ir.VectorType(I16, count)), ints)
    return b.bitcast(b.shl(upper, constant(16, ints)), floats)


def _padded(b: Any, eight: Value) -> Value:
    """A vector of 8 in one of WIDTH, whose other lanes are 0."""
    return b.shuffle_vector(eight, constant(0.0, V8), ir.Constant(ir.VectorType(I32, WIDTH), list(range(WIDTH))))


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


@contextmanager
def _parts(b: Any, dim: Value, width: int = 8, beyond: int = 0) -> Iterator[Value]:
    """A loop over the channels of a row, so many at a time, as far as these go; `beyond` what a loop of so many at a
    time has done. Gives the first channel."""
    first = ir.Constant(I64, 0) if not beyond else b.sub(dim, b.urem(dim, ir.Constant(I64, beyond)))
    count = b.udiv(b.sub(dim, first), ir.Constant(I64, width))
    with cgutils.for_range(b, count, intp=I64) as loop:
        yield b.add(first, b.mul(loop.index, ir.Constant(I64, width)))


@contextmanager
def _rest(b: Any, dim: Value) -> Iterator[Value]:
    """The eight channels that are left where a row is no multiple of WIDTH."""
    with _parts(b, dim, 8, WIDTH) as channel:
        yield channel


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


@emits("iiiiiiiiifiiii")
def scores(b: Any, kind: Value, heads: Value, *values: Value) -> None:
    """out[g, i] = scale * q[g] · key i, for up to MAX_HEADS heads g. Arguments: out, bytes from one row of out to the
    next, q [heads, dim], keys, their count, bytes from one to the next, dim (a multiple of 8), scale; then for how many
    KV heads, rows of out and q from one of these to the next, bytes from its keys to the next one's, and where what is
    read next begins."""
    *values, kv_heads, each, gap, ahead = values

    def write(b: Any, kind: int, heads: int, out: Value, line: Value, q: Value, keys: Value, *others: Value) -> None:
        count, _, dim, _ = others
        with cgutils.for_range(b, kv_heads, intp=I64) as kv:
            row = b.mul(kv.index, each)
            own_out, own_q = b.add(out, b.mul(row, line)), plus(b, q, b.mul(row, dim), 4)
            own_keys, near = b.add(keys, b.mul(kv.index, gap)), _share(b, ahead, kv.index, count, dim, kind)
            _scores(b, kind, heads, near, own_out, line, own_q, own_keys, *others)

    _for_each_kind(b, kind, heads, write, *values)


@emits("iiiiiiiiiiiiii")
def accumulate(b: Any, kind: Value, heads: Value, *values: Value) -> None:
    """out[g] += sum over i of weights[g, i] * value i. Arguments: out, bytes from one row to the next, weights, bytes
    from one row to the next, values, their count, bytes from one to the next, dim; then for how many KV heads, rows of
    out and weights from one of these to the next, bytes from its values to the next one's, and where what is read next
    begins."""
    *values, kv_heads, each, gap, ahead = values

    def write(b: Any, kind: int, heads: int, out: Value, out_line: Value, weights: Value, *others: Value) -> None:
        line, rows, count, stride, dim = others
        with cgutils.for_range(b, kv_heads, intp=I64) as kv:
            row, near = b.mul(kv.index, each), _share(b, ahead, kv.index, count, dim, kind)
            own_out, own_weights = b.add(out, b.mul(row, out_line)), b.add(weights, b.mul(row, line))
            own_rows = b.add(rows, b.mul(kv.index, gap))
            _accumulate(b, kind, heads, near, own_out, out_line, own_weights, line, own_rows, count, stride, dim)

    _for_each_kind(b, kind, heads, write, *values)


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

        with _parts(b, dim, WIDTH) as channel:
            add(channel, lambda at: load(b, at, WIDE), lambda at: _load_kv(b, at, kind, WIDTH))
            read = b.add(b.mul(first, dim), b.mul(channel, ir.Constant(I64, number)))
            _bring(b, plus(b, ahead, read, size), WIDTH * number * size)
        with _rest(b, dim) as channel:
            add(channel, lambda at: _padded(b, load(b, at, V8)), lambda at: _padded(b, _load_kv(b, at, kind)))
        return [[b.load(total) for total in row] for row in totals]

    fours = b.lshr(count, ir.Constant(I64, 2))
    with cgutils.for_range(b, fours, intp=I64) as loop:
        first = b.shl(loop.index, ir.Constant(I64, 2))
        for g, row in enumerate(some(first, 4)):
            sums = b.fmul(_sums_of_four(b, row), splat(b, scale, 4))
            store(b, sums, plus(b, plus(b, out, first, 4), b.mul(line, ir.Constant(I64, g))))
    rest = b.and_(count, ir.Constant(I64, 3))
    with cgutils.for_range(b, rest, intp=I64) as loop:
        index = b.add(b.shl(fours, ir.Constant(I64, 2)), loop.index)
        for g, row in enumerate(some(index, 1)):
            sums = b.fmul(_sums_of_four(b, row * 4), splat(b, scale, 4))
            value = b.extract_element(sums, ir.Constant(I32, 0))
            store(b, value, plus(b, plus(b, out, index, 4), b.mul(line, ir.Constant(I64, g))))


def _accumulate(
    b: Any,
    kind: int,
    heads: int,
    ahead: Value,
    out: Value,
    gap: Value,
    weights: Value,
    line: Value,
    rows: Value,
    count: Value,
    stride: Value,
    dim: Value,
) -> None:
    size = SIZES[kind]

    def columns(channel: Value, number: int, width: int) -> None:
        """`number` vectors of `width` sums: those of one vector wait for each other, those of several do not."""
        lanes = ir.VectorType(F32, width)
        own = [b.add(channel, ir.Constant(I64, width * i)) for i in range(number)]
        places = [[b.add(plus(b, out, i, 4), b.mul(gap, ir.Constant(I64, g))) for i in own] for g in range(heads)]
        totals = [[variable(b, constant(0.0, lanes)) for _ in own] for _ in range(heads)]
        pairs = [pair for g in range(heads) for pair in zip(places[g], totals[g], strict=True)]
        for place, total in pairs:
            b.store(load(b, place, lanes), total)
        with cgutils.for_range(b, count, intp=I64) as loop:
            row = b.add(rows, b.mul(loop.index, stride))
            values = [_load_kv(b, plus(b, row, i, size), kind, width) for i in own]
            for g in range(heads):
                at = b.add(plus(b, weights, loop.index, 4), b.mul(line, ir.Constant(I64, g)))
                weight = splat(b, load(b, at, F32), width)
                for value, total in zip(values, totals[g], strict=True):
                    b.store(fma(b, weight, value, b.load(total)), total)
            read = b.add(b.mul(channel, count), b.mul(loop.index, ir.Constant(I64, width * number)))
            _bring(b, plus(b, ahead, read, size), width * number * size)
        for place, total in pairs:
            store(b, b.load(total), place)

    with _parts(b, dim, 4 * WIDTH) as channel:
        columns(channel, 4, WIDTH)
    with _parts(b, dim, WIDTH, 4 * WIDTH) as channel:
        columns(channel, 1, WIDTH)
    with _rest(b, dim) as channel:
        columns(channel, 1, 8)


def _widen(kind: int) -> Any:
    size = SIZES[kind]

    @emits("iiii")
    def widen(b: Any, out: Value, row: Value, ignored: Value, dim: Value) -> None:
        """A row as float32."""
        with _parts(b, dim) as part:
            store(b, _load_kv(b, plus(b, row, part, size), kind), plus(b, out, part, 4))

    return widen


def _round_bf16(b: Any, value: Value) -> Value:
    """To the nearest, ties to even; NaN stays NaN."""
    bits = b.bitcast(value, INTS)
    odd = b.and_(b.lshr(bits, constant(16, INTS)), constant(1, INTS))
    rounded = b.lshr(b.add(bits, b.add(odd, constant(0x7FFF, INTS))), constant(16, INTS))
    nan = b.fcmp_unordered("uno", value, value)
    return b.trunc(b.select(nan, constant(0x7FC0, INTS), rounded), ir.VectorType(I16, 8))


def _save(kind: int) -> Any:
    size = SIZES[kind]

    @emits("iii")
    def save(b: Any, out: Value, values: Value, dim: Value) -> None:
        """float32 `values` into a cache row."""
        with _parts(b, dim) as part:
            value = load(b, plus(b, values, part, 4), V8)
            if kind == FP16:
                value = b.fptrunc(value, ir.VectorType(F16, 8))
            elif kind == BF16:
                value = _round_bf16(b, value)
            store(b, value, plus(b, out, part, size))

    return save


def _rounded(b: Any, value: Value) -> Value:
    """float32 [8] as int32 [8], halves to even."""
    return b.fptosi(llvm_call(b, "llvm.rint.v8f32", V8, value), INTS)


@emits("iiiiii")
def pack_int8(b: Any, key_out: Value, value_out: Value, scale_out: Value, key: Value, value: Value, dim: Value) -> None:
    """round(x / s), s = max(|K|, |V|) / 127 of the pair."""
    most = variable(b, constant(0.0, V8))
    b.store(constant(0.0, V8), most)
    for row in (key, value):
        with _parts(b, dim) as part:
            size = llvm_call(b, "llvm.fabs.v8f32", V8, load(b, plus(b, row, part, 4), V8))
            b.store(llvm_call(b, "llvm.maxnum.v8f32", V8, b.load(most), size), most)
    largest = llvm_call(b, "llvm.vector.reduce.fmax.v8f32", F32, b.load(most))
    scale = b.fdiv(largest, ir.Constant(F32, 127.0))
    store(b, scale, scale_out)
    empty = b.fcmp_ordered("==", scale, ir.Constant(F32, 0.0))
    divisor = splat(b, b.select(empty, ir.Constant(F32, 1.0), scale), 8)
    for row, out in ((key, key_out), (value, value_out)):
        with _parts(b, dim) as part:
            code = _rounded(b, b.fdiv(load(b, plus(b, row, part, 4), V8), divisor))
            store(b, b.trunc(code, BYTES), plus(b, out, part))


@emits("iiii")
def unpack_int8(b: Any, out: Value, row: Value, scale: Value, dim: Value) -> None:
    factor = splat(b, load(b, scale, F32), 8)
    with _parts(b, dim) as part:
        code = b.sitofp(b.sext(load(b, plus(b, row, part), BYTES), INTS), V8)
        store(b, b.fmul(code, factor), plus(b, out, part, 4))


@emits("iii")
def pack_fp8(b: Any, out: Value, values: Value, dim: Value) -> None:
    """e4m3, saturating; halves to even. Below 2**-6 codes are whole multiples of 2**-9."""
    with _parts(b, dim) as part:
        value = load(b, plus(b, values, part, 4), V8)
        sign = b.and_(b.lshr(b.bitcast(value, INTS), constant(24, INTS)), constant(0x80, INTS))
        size = llvm_call(b, "llvm.fabs.v8f32", V8, value)
        bits = b.bitcast(llvm_call(b, "llvm.minnum.v8f32", V8, size, constant(448.0, V8)), INTS)
        odd = b.and_(b.lshr(bits, constant(20, INTS)), constant(1, INTS))
        normal = b.lshr(b.add(bits, b.add(odd, constant(0x7FFFF, INTS))), constant(20, INTS))
        normal = b.sub(normal, constant(120 << 3, INTS))
        small = b.fcmp_ordered("<", size, constant(2.0**-6, V8))
        code = b.select(small, _rounded(b, b.fmul(size, constant(512.0, V8))), normal)
        code = b.select(b.fcmp_unordered("uno", value, value), constant(0x7F, INTS), code)
        store(b, b.trunc(b.or_(code, sign), BYTES), plus(b, out, part))


@emits("iiii")
def unpack_fp8(b: Any, out: Value, row: Value, ignored: Value, dim: Value) -> None:
    """The code's exponent and mantissa stand where float32 has them; 2**120 makes up for the other bias."""
    with _parts(b, dim) as part:
        code = b.zext(load(b, plus(b, row, part), BYTES), INTS)
        sign = b.shl(b.and_(code, constant(0x80, INTS)), constant(24, INTS))
        size = b.and_(code, constant(0x7F, INTS))
        value = b.fmul(b.bitcast(b.shl(size, constant(20, INTS)), V8), constant(2.0**120, V8))
        nan = b.icmp_unsigned("==", size, constant(0x7F, INTS))
        bits = b.select(nan, constant(0x7FC00000, INTS), b.or_(b.bitcast(value, INTS), sign))
        store(b, b.bitcast(bits, V8), plus(b, out, part, 4))


def _eights(b: Any, dim: Value, group: Value) -> Value:
    """Eights of channels in an int4 group: four, or what is left of the row."""
    left = b.sub(b.lshr(dim, ir.Constant(I64, 3)), b.shl(group, ir.Constant(I64, 2)))
    return b.select(b.icmp_signed("<", left, ir.Constant(I64, 4)), left, ir.Constant(I64, 4))


def _groups(b: Any, dim: Value) -> Value:
    return b.udiv(b.add(dim, ir.Constant(I64, GROUP - 1)), ir.Constant(I64, GROUP))


_NIBBLES = ir.Constant(INTS, [0, 4] * 4)


@emits("iiii")
def pack_int4(b: Any, out: Value, scales: Value, values: Value, dim: Value) -> None:
    """round((x - minimum) / step) in 0..15 with step and minimum as stored; channel 2 i in the low nibble."""
    groups = _groups(b, dim)
    with cgutils.for_range(b, groups, intp=I64) as group:
        first = plus(b, values, group.index, 4 * GROUP)
        least, most = (variable(b, constant(0.0, V8)) for _ in range(2))
        b.store(load(b, first, V8), least)
        b.store(load(b, first, V8), most)
        with cgutils.for_range(b, _eights(b, dim, group.index), intp=I64) as part:
            value = load(b, plus(b, first, part.index, 32), V8)
            b.store(llvm_call(b, "llvm.minnum.v8f32", V8, b.load(least), value), least)
            b.store(llvm_call(b, "llvm.maxnum.v8f32", V8, b.load(most), value), most)
        low = llvm_call(b, "llvm.vector.reduce.fmin.v8f32", F32, b.load(least))
        high = llvm_call(b, "llvm.vector.reduce.fmax.v8f32", F32, b.load(most))
        step = b.fptrunc(b.fdiv(b.fsub(high, low), ir.Constant(F32, 15.0)), F16)
        minimum = b.fptrunc(low, F16)
        store(b, step, plus(b, scales, group.index, 2))
        store(b, minimum, plus(b, scales, b.add(groups, group.index), 2))
        wide = b.fpext(step, F32)
        empty = b.fcmp_ordered("==", wide, ir.Constant(F32, 0.0))
        divisor = splat(b, b.select(empty, ir.Constant(F32, float("inf")), wide), 8)
        bottom = splat(b, b.fpext(minimum, F32), 8)
        with cgutils.for_range(b, _eights(b, dim, group.index), intp=I64) as part:
            value = b.fdiv(b.fsub(load(b, plus(b, first, part.index, 32), V8), bottom), divisor)
            value = llvm_call(b, "llvm.maxnum.v8f32", V8, value, constant(0.0, V8))
            value = llvm_call(b, "llvm.minnum.v8f32", V8, value, constant(15.0, V8))
            code = b.trunc(b.shl(_rounded(b, value), _NIBBLES), BYTES)
            lanes = [ir.Constant(ir.VectorType(I32, 4), [kind, kind + 2, kind + 4, kind + 6]) for kind in (0, 1)]
            both = b.or_(*(b.shuffle_vector(code, code, lane) for lane in lanes))
            store(b, both, plus(b, plus(b, out, group.index, GROUP // 2), part.index, 4))


@emits("iiii")
def unpack_int4(b: Any, out: Value, row: Value, scales: Value, dim: Value) -> None:
    groups = _groups(b, dim)
    with cgutils.for_range(b, groups, intp=I64) as group:
        step = splat(b, b.fpext(load(b, plus(b, scales, group.index, 2), F16), F32), 8)
        minimum = splat(b, b.fpext(load(b, plus(b, scales, b.add(groups, group.index), 2), F16), F32), 8)
        with cgutils.for_range(b, _eights(b, dim, group.index), intp=I64) as part:
            pairs = load(b, plus(b, plus(b, row, group.index, GROUP // 2), part.index, 4), ir.VectorType(I8, 4))
            spread = b.shuffle_vector(pairs, pairs, ir.Constant(INTS, [0, 0, 1, 1, 2, 2, 3, 3]))
            code = b.and_(b.lshr(b.zext(spread, INTS), _NIBBLES), constant(15, INTS))
            place = plus(b, plus(b, out, group.index, 4 * GROUP), part.index, 32)
            store(b, fma(b, b.sitofp(code, V8), step, minimum), place)


widen_fp32, widen_fp16, widen_bf16 = (_widen(kind) for kind in WIDE_KINDS)
save_fp32, save_fp16, save_bf16 = (_save(kind) for kind in (FP32, FP16, BF16))
