"""Vector code of products with quantised weights: int8 activations, integer sums within a block.

A panel is eight rows of a weight matrix, block by block of 32 columns: eight float16 scales, in Q4_1 eight minima, then
the codes in steps of four columns, 32 bytes of [row, column] each. Four-bit codes lie two to a byte, step k low and
k + 4 high. A panel takes the bytes of its rows in a GGUF file.

Activations are int8 codes [rows, columns padded], then float32 [blocks, rows, 2]: scale, and scale * sum of codes.
What a block contributes is an exact integer before it meets its scales, so a result depends neither on the processor's
word length nor on other rows of the batch.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    Q4_0,
    Q4_1,
    Q8_0,
    V8,
    Value,
    constant,
    emits,
    exp,
    fma,
    llvm_call,
    load,
    max_of,
    plus,
    prefetch_line,
    splat,
    store,
    sum_of,
    variable,
)

PANEL = 8
PANEL_BYTES = tuple(PANEL * size for size in (18, 20, 34))
TOKEN_TILE = 4
STEPS = 8  # of four columns in a block
AHEAD = 4096  # bytes of weights that are asked for before they are needed; a processor's own guesses end with a page
BYTES, WORDS, INTS = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)
_AVX2 = llvmlite.binding.get_process_triple().startswith("x86_64")
_FEATURES = llvmlite.binding.get_host_cpu_features()
HAS_VNNI = _AVX2 and bool(_FEATURES.get("avxvnni") or (_FEATURES.get("avx512vnni") and _FEATURES.get("avx512vl")))


def _pair_sums(b: Any, products: Value) -> Value:
    """Sums of neighbours."""
    count = products.type.count // 2
    lanes = [ir.Constant(ir.VectorType(I32, count), [2 * i + odd for i in range(count)]) for odd in (0, 1)]
    return b.add(*(b.shuffle_vector(products, products, lane) for lane in lanes))


def _dot_bytes(b: Any, unsigned: Value, signed: Value) -> Value:
    """Products of uint8 and int8, summed by pairs into int16; whoever calls keeps them in range."""
    if _AVX2:
        return llvm_call(b, "llvm.x86.avx2.pmadd.ub.sw", WORDS, unsigned, signed)
    wide = ir.VectorType(I16, 32)
    return _pair_sums(b, b.mul(b.zext(unsigned, wide), b.sext(signed, wide)))


def _sum_words(b: Any, words: Value) -> Value:
    """int16 summed by pairs into int32."""
    if _AVX2:
        return llvm_call(b, "llvm.x86.avx2.pmadd.wd", INTS, words, constant(1, WORDS))
    return _pair_sums(b, b.sext(words, ir.VectorType(I32, 16)))


def _add_pairs(b: Any, total: Value | None, unsigned: Value, signed: Value) -> Value:
    """int16 [16] += products of uint8 and int8, summed by pairs."""
    part = _dot_bytes(b, unsigned, signed)
    return part if total is None else b.add(total, part)


def _add_dots(b: Any, total: Value | None, unsigned: Value, signed: Value) -> Value:
    """int32 [8] += products of uint8 and int8, summed by fours."""
    if HAS_VNNI:
        parts = (b.bitcast(unsigned, INTS), b.bitcast(signed, INTS))
        return llvm_call(b, "llvm.x86.avx512.vpdpbusd.256", INTS, total or constant(0, INTS), *parts)
    part = _sum_words(b, _dot_bytes(b, unsigned, signed))
    return part if total is None else b.add(total, part)


def _with_sign(b: Any, values: Value, of: Value) -> Value:
    """-values where `of` is negative; whatever where it is 0."""
    if _AVX2:
        return llvm_call(b, "llvm.x86.avx2.psign.b", BYTES, values, of)
    return b.select(b.icmp_signed("<", of, constant(0, BYTES)), b.neg(values), values)


def _sizes(b: Any, values: Value) -> Value:
    """|values|, that of -128 as uint8."""
    return b.select(b.icmp_signed("<", values, constant(0, BYTES)), b.neg(values), values)


def eight_halves(b: Any, address: Value) -> Value:
    return b.fpext(load(b, address, ir.VectorType(F16, 8)), V8)


def _four_columns(b: Any, codes: Value, step: int) -> Value:
    """Four codes of a row of activations, once for each row of the panel."""
    value = splat(b, load(b, plus(b, codes, 4 * step), I32), 8)
    return b.bitcast(value, BYTES)


def _nibble_sums(b: Any, codes: Value, xs: list[Value]) -> list[Value]:
    """int32 [8] per token: 8 * 2 * 15 * 127 fits int16, so without VNNI a block is summed there."""
    add = _add_dots if HAS_VNNI else _add_pairs
    low: list[Value | None] = [None] * len(xs)
    high: list[Value | None] = [None] * len(xs)
    for step in range(STEPS // 2):
        both = load(b, plus(b, codes, 32 * step), BYTES)
        halves = b.and_(both, constant(15, BYTES)), b.lshr(both, constant(4, BYTES))
        for totals, weights, at in zip((low, high), halves, (step, step + STEPS // 2), strict=True):
            for t, x in enumerate(xs):
                totals[t] = add(b, totals[t], weights, _four_columns(b, x, at))
    sums = [b.add(*pair) for pair in zip(low, high, strict=True)]
    return sums if HAS_VNNI else [_sum_words(b, total) for total in sums]


def _byte_sums(b: Any, codes: Value, xs: list[Value]) -> list[Value]:
    """As `_nibble_sums`; |weight| <= 128 and |x| <= 127 leave no room in int16 beyond a pair."""
    totals: list[Value | None] = [None] * len(xs)
    for step in range(STEPS):
        weights = load(b, plus(b, codes, 32 * step), BYTES)
        sizes = _sizes(b, weights)
        for t, x in enumerate(xs):
            signed = _with_sign(b, _four_columns(b, x, step), weights)
            totals[t] = _add_dots(b, totals[t], sizes, signed)
    return list(totals)


def _panel(fmt: int, tokens: int) -> Any:
    @emits("iiiiii")
    def panel(b: Any, weights: Value, blocks: Value, x: Value, x_scales: Value, gap: Value, out: Value) -> None:
        """out float32 [tokens, 8] = rows of a panel · rows of activations: codes at `x`, and scales and sums, `gap`
        bytes from those of a block to the next block's."""
        rows = [plus(b, x, b.mul(blocks, ir.Constant(I64, t)), 32) for t in range(tokens)]
        totals = [variable(b, constant(0.0, V8)) for _ in range(tokens)]
        for total in totals:
            b.store(constant(0.0, V8), total)
        with cgutils.for_range(b, blocks, intp=I64) as loop:
            record = plus(b, weights, loop.index, PANEL_BYTES[fmt])
            for line in range(0, PANEL_BYTES[fmt], 64):
                prefetch_line(b, plus(b, record, AHEAD + line))
            codes = plus(b, record, 32 if fmt == Q4_1 else 16)
            xs = [plus(b, row, loop.index, 32) for row in rows]
            sums = (_byte_sums if fmt == Q8_0 else _nibble_sums)(b, codes, xs)
            scales = eight_halves(b, record)
            minima = None
            if fmt == Q4_1:
                minima = eight_halves(b, plus(b, record, 16))
            elif fmt == Q4_0:
                minima = b.fmul(scales, constant(-8.0, V8))
            for t, (total, codes_sum) in enumerate(zip(totals, sums, strict=True)):
                own = plus(b, b.add(x_scales, b.mul(gap, loop.index)), 8 * t)
                scale = b.fmul(scales, splat(b, load(b, own, F32), 8))
                value = fma(b, b.sitofp(codes_sum, V8), scale, b.load(total))
                if minima is not None:
                    whole = load(b, plus(b, own, 4), F32)
                    value = fma(b, minima, splat(b, whole, 8), value)
                b.store(value, total)
        for t, total in enumerate(totals):
            store(b, b.load(total), plus(b, out, 4 * PANEL * t))

    return panel


def _row(fmt: int) -> Any:
    four, floats = ir.VectorType(I8, 4), ir.VectorType(F32, 4)

    def one(b: Any, address: Value) -> Value:
        return splat(b, b.fpext(load(b, address, F16), F32), 4)

    @emits("iiii")
    def row(b: Any, panel: Value, blocks: Value, lane: Value, out: Value) -> None:
        """out float32 [32 blocks] = row `lane` of a panel, as the file's format defines it."""
        with cgutils.for_range(b, blocks, intp=I64) as loop:
            record = plus(b, panel, loop.index, PANEL_BYTES[fmt])
            scale = one(b, plus(b, record, lane, 2))
            codes = plus(b, plus(b, record, lane, 4), 32 if fmt == Q4_1 else 16)

            def put(step: int, code: Value) -> None:
                if fmt == Q8_0:
                    value = b.fmul(b.sitofp(code, floats), scale)
                elif fmt == Q4_1:
                    value = b.fadd(b.fmul(b.uitofp(code, floats), scale), one(b, plus(b, plus(b, record, lane, 2), 16)))
                else:
                    value = b.fmul(b.fsub(b.uitofp(code, floats), constant(8.0, floats)), scale)
                store(b, value, plus(b, plus(b, out, loop.index, 128), 16 * step))

            for step in range(STEPS if fmt == Q8_0 else STEPS // 2):
                both = load(b, plus(b, codes, 32 * step), four)
                if fmt == Q8_0:
                    put(step, both)
                else:
                    put(step, b.and_(both, constant(15, four)))
                    put(step + STEPS // 2, b.lshr(both, constant(4, four)))

    return row


@emits("iii")
def quantise_block(b: Any, x: Value, codes: Value, out: Value) -> None:
    """32 float32 of a row of activations as codes, with their scale and scale * sum of codes into `out`.

    A NaN or an infinity among them makes the scale NaN.
    """
    parts = [load(b, plus(b, x, 32 * i), V8) for i in range(4)]
    sizes = [llvm_call(b, "llvm.fabs.v8f32", V8, part) for part in parts]
    most, total = sizes[0], sizes[0]
    for size in sizes[1:]:
        most = b.select(b.fcmp_ordered(">", size, most), size, most)
        total = b.fadd(total, size)
    largest = max_of(b, most)
    empty = b.fcmp_ordered("==", largest, ir.Constant(F32, 0.0))
    inverse = b.select(empty, ir.Constant(F32, 0.0), b.fdiv(ir.Constant(F32, 127.0), largest))
    scale = b.fmul(largest, ir.Constant(F32, 1 / 127))
    scale = b.fadd(scale, b.fmul(sum_of(b, total), ir.Constant(F32, 0.0)))
    codes_sum = constant(0, INTS)
    for i, part in enumerate(parts):
        code = b.fptosi(llvm_call(b, "llvm.rint.v8f32", V8, b.fmul(part, splat(b, inverse, 8))), INTS)
        codes_sum = b.add(codes_sum, code)
        store(b, b.trunc(code, ir.VectorType(I8, 8)), plus(b, codes, 8 * i))
    count = b.sitofp(llvm_call(b, "llvm.vector.reduce.add.v8i32", I32, codes_sum), F32)
    store(b, scale, out)
    store(b, b.fmul(scale, count), plus(b, out, 4))


def put_outputs(b: Any, dot: Value, out: Value, factor: Value, bias: Value, adds: Value) -> None:
    """out = adds * out + dot * factor + bias, as many as `dot` has; an address of 0 is no bias."""
    kind, nothing = dot.type, ir.Constant(I64, 0)
    more, before = (variable(b, constant(0.0, kind)) for _ in range(2))
    for place, address, wanted in ((more, bias, bias), (before, out, adds)):
        b.store(constant(0.0, kind), place)
        with b.if_then(b.icmp_signed("!=", wanted, nothing)):
            b.store(load(b, address, kind), place)
    value = fma(b, dot, splat(b, factor, kind.count), b.load(more))
    store(b, b.fadd(value, b.load(before)), out)


@emits("iifii")
def put_panel(b: Any, out: Value, dot: Value, factor: Value, bias: Value, adds: Value) -> None:
    """out float32 [8] = adds * out + dot * factor + bias."""
    put_outputs(b, load(b, dot, V8), out, factor, bias, adds)


@emits("iii")
def gate_panel(b: Any, out: Value, gate: Value, up: Value) -> None:
    """out float32 [8] = silu(gate) * up."""
    value = load(b, gate, V8)
    sigmoid = b.fdiv(constant(1.0, V8), b.fadd(constant(1.0, V8), exp(b, b.fneg(value))))
    store(b, b.fmul(b.fmul(value, sigmoid), load(b, up, V8)), out)


panel_q4_0, panel_q4_1, panel_q8_0 = (_panel(fmt, 1) for fmt in (Q4_0, Q4_1, Q8_0))
tile_q4_0, tile_q4_1, tile_q8_0 = (_panel(fmt, TOKEN_TILE) for fmt in (Q4_0, Q4_1, Q8_0))
row_q4_0, row_q4_1, row_q8_0 = (_row(fmt) for fmt in (Q4_0, Q4_1, Q8_0))
