"""Rows of the KV cache as vector code: to and from float32, in as many bits or in fewer.

A row is one head of one token. The quantised formats are those of `kernels.kv_format`; their rows are unpacked to
float32 before they are used, once for all query heads that share them. `dim` is a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    WIDTH,
    Value,
    constant,
    emits,
    fma,
    llvm_call,
    load,
    plus,
    splat,
    store,
    variable,
)

FP32, FP16, BF16, INT8, FP8, INT4 = range(6)
WIDE_KINDS = (FP32, FP16, BF16)
SIZES = (4, 2, 2)
GROUP = 32  # channels that share a step and a minimum in int4
INTS, BYTES = ir.VectorType(I32, 8), ir.VectorType(I8, 8)


def load_kv(b: Any, address: Value, kind: int, count: int = 8) -> Value:
    """`count` numbers of a row, as float32."""
    floats, ints = ir.VectorType(F32, count), ir.VectorType(I32, count)
    if kind == FP32:
        return load(b, address, floats)
    if kind == FP16:
        return b.fpext(load(b, address, ir.VectorType(F16, count)), floats)
    upper = b.zext(load(b, address, ir.VectorType(I16, count)), ints)
    return b.bitcast(b.shl(upper, constant(16, ints)), floats)


@contextmanager
def parts(b: Any, dim: Value, width: int = 8, beyond: int = 0) -> Iterator[Value]:
    """A loop over the channels of a row, so many at a time, as far as these go; `beyond` what a loop of so many at a
    time has done. Gives the first channel."""
    first = ir.Constant(I64, 0) if not beyond else b.sub(dim, b.urem(dim, ir.Constant(I64, beyond)))
    count = b.udiv(b.sub(dim, first), ir.Constant(I64, width))
    with cgutils.for_range(b, count, intp=I64) as loop:
        yield b.add(first, b.mul(loop.index, ir.Constant(I64, width)))


@contextmanager
def rest(b: Any, dim: Value) -> Iterator[Value]:
    """The eight channels that are left where a row is no multiple of WIDTH."""
    with parts(b, dim, 8, WIDTH) as channel:
        yield channel


def padded(b: Any, eight: Value) -> Value:
    """A vector of 8 in one of WIDTH, whose other lanes are 0."""
    return b.shuffle_vector(eight, constant(0.0, V8), ir.Constant(ir.VectorType(I32, WIDTH), list(range(WIDTH))))


def _widen(kind: int) -> Any:
    size = SIZES[kind]

    @emits("iiiiii")
    def widen(b: Any, out: Value, gap: Value, row: Value, stride: Value, count: Value, dim: Value) -> None:
        """`count` rows, `stride` bytes apart, as float32, `gap` bytes apart."""
        with cgutils.for_range(b, count, intp=I64) as loop:
            source, target = b.add(row, b.mul(loop.index, stride)), b.add(out, b.mul(loop.index, gap))
            with parts(b, dim, WIDTH) as part:
                store(b, load_kv(b, plus(b, source, part, size), kind, WIDTH), plus(b, target, part, 4))
            with rest(b, dim) as part:
                store(b, load_kv(b, plus(b, source, part, size), kind), plus(b, target, part, 4))

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
        with parts(b, dim) as part:
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
        with parts(b, dim) as part:
            size = llvm_call(b, "llvm.fabs.v8f32", V8, load(b, plus(b, row, part, 4), V8))
            b.store(llvm_call(b, "llvm.maxnum.v8f32", V8, b.load(most), size), most)
    largest = llvm_call(b, "llvm.vector.reduce.fmax.v8f32", F32, b.load(most))
    scale = b.fdiv(largest, ir.Constant(F32, 127.0))
    store(b, scale, scale_out)
    empty = b.fcmp_ordered("==", scale, ir.Constant(F32, 0.0))
    divisor = splat(b, b.select(empty, ir.Constant(F32, 1.0), scale), 8)
    for row, out in ((key, key_out), (value, value_out)):
        with parts(b, dim) as part:
            code = _rounded(b, b.fdiv(load(b, plus(b, row, part, 4), V8), divisor))
            store(b, b.trunc(code, BYTES), plus(b, out, part))


@emits("iiii")
def unpack_int8(b: Any, out: Value, row: Value, scale: Value, dim: Value) -> None:
    factor = splat(b, load(b, scale, F32), 8)
    with parts(b, dim) as part:
        code = b.sitofp(b.sext(load(b, plus(b, row, part), BYTES), INTS), V8)
        store(b, b.fmul(code, factor), plus(b, out, part, 4))


@emits("iii")
def pack_fp8(b: Any, out: Value, values: Value, dim: Value) -> None:
    """e4m3, saturating; halves to even. Below 2**-6 codes are whole multiples of 2**-9."""
    with parts(b, dim) as part:
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
    with parts(b, dim) as part:
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
