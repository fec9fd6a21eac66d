"""Products of whole-number tiles in a processor's tile registers (AMX): 16 tokens by two panels at a time.

What they give is bit for bit what `panel_ir` gives: a block's sum is a whole number, and meets its scales in the same
order.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.ir import (
    F32,
    I8,
    I32,
    I64,
    Q4_0,
    Q4_1,
    Q8_0,
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
from kernels.cpu.panel_ir import BYTES, PANEL, PANEL_BYTES, STEPS, eight_halves, put_outputs

TOKENS = 16  # of a tile
SPREAD_BYTES = 640  # of a block of two panels: 16 scales and minima in float32, then eight steps of codes as bytes
_LANES = 2 * PANEL
WIDE = ir.VectorType(F32, _LANES)
SUMS, X, WEIGHTS = range(3)  # tile registers
_FEATURES = llvmlite.binding.get_host_cpu_features()
HAS_AMX = sys.platform == "linux" and all(_FEATURES.get(name) for name in ("amx-int8", "amx-tile", "avx512f"))


@cache
def is_allowed() -> bool:
    """Whether the system lets this process use tile registers: each has to ask, once."""
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    return HAS_AMX and ctypes.CDLL(None).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


def _tile_call(b: Any, name: str, *values: Value | int) -> None:
    """An LLVM intrinsic; numbers of tile registers are ints."""
    llvm_call(b, f"llvm.x86.{name}", ir.VoidType(), *(ir.Constant(I8, v) if isinstance(v, int) else v for v in values))


def _pointer(b: Any, address: Value) -> Value:
    return b.inttoptr(address, I8.as_pointer())


@emits("i")
def begin(b: Any, ignored: Value) -> None:
    """This thread's tile registers get their rows and bytes of a row."""
    config = bytearray(64)
    config[0] = 1
    shapes = {SUMS: (TOKENS, 4 * _LANES), X: (TOKENS, 32), WEIGHTS: (STEPS, 4 * _LANES)}
    for register, (rows, width) in shapes.items():
        config[16 + 2 * register], config[48 + register] = width, rows
    place = cgutils.global_constant(b, "tile_shapes", ir.Constant(ir.ArrayType(I8, 64), config))
    _tile_call(b, "ldtilecfg", b.bitcast(place, I8.as_pointer()))


@emits("i")
def end(b: Any, ignored: Value) -> None:
    """The system need not keep them any more when it stops the thread."""
    _tile_call(b, "tilerelease")


def _joined(b: Any, parts: list[Value]) -> Value:
    count = parts[0].type.count
    return b.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, 2 * count), list(range(2 * count))))


def _spread(fmt: int) -> Any:
    @emits("iiii")
    def spread(b: Any, panel: Value, size: Value, blocks: Value, out: Value) -> None:
        """Two panels, the second `size` bytes behind the first, as `square_*` read them."""
        panels = [panel, b.add(panel, size)]
        with cgutils.for_range(b, blocks, intp=I64) as loop:
            records = [plus(b, one, loop.index, PANEL_BYTES[fmt]) for one in panels]
            place = plus(b, out, loop.index, SPREAD_BYTES)
            scales = _joined(b, [eight_halves(b, record) for record in records])
            store(b, scales, place)
            if fmt == Q4_1:
                store(b, _joined(b, [eight_halves(b, plus(b, record, 16)) for record in records]), plus(b, place, 64))
            elif fmt == Q4_0:
                store(b, b.fmul(scales, constant(-8.0, WIDE)), plus(b, place, 64))
            for step in range(STEPS if fmt == Q8_0 else STEPS // 2):
                at = (32 if fmt == Q4_1 else 16) + 32 * step
                codes = _joined(b, [load(b, plus(b, record, at), BYTES) for record in records])
                target = plus(b, place, 128 + 64 * step)
                if fmt == Q8_0:
                    store(b, codes, target)
                else:
                    store(b, b.and_(codes, constant(15, codes.type)), target)
                    store(b, b.lshr(codes, constant(4, codes.type)), plus(b, target, 64 * STEPS // 2))

    return spread


def _square(fmt: int) -> Any:
    kind, dot = ir.VectorType(I32, _LANES), "tdpbssd" if fmt == Q8_0 else "tdpbsud"

    @emits("iiiiiiiiii")
    def square(
        b: Any,
        weights: Value,
        blocks: Value,
        x: Value,
        x_scales: Value,
        gap: Value,
        out: Value,
        stride: Value,
        factor: Value,
        bias: Value,
        adds: Value,
    ) -> None:
        """out float32 [16, 16], `stride` bytes from row to row, = adds * out + 16 rows of activations · two panels that
        are spread * factor + bias. Activations are as `panel_ir` has them, factor is an address, bias too, 0 for none.
        """
        factor = load(b, factor, F32)
        sums = b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(kind, TOKENS)), I64)
        x_stride, row = b.mul(blocks, ir.Constant(I64, 32)), ir.Constant(I64, 4 * _LANES)
        totals = [variable(b, constant(0.0, WIDE)) for _ in range(TOKENS)]
        for total in totals:
            b.store(constant(0.0, WIDE), total)
        with cgutils.for_range(b, blocks, intp=I64) as loop:
            record, own = plus(b, weights, loop.index, SPREAD_BYTES), b.add(x_scales, b.mul(gap, loop.index))
            _tile_call(b, "tilezero", SUMS)
            _tile_call(b, "tileloadd64", X, _pointer(b, plus(b, x, loop.index, 32)), x_stride)
            _tile_call(b, "tileloadd64", WEIGHTS, _pointer(b, plus(b, record, 128)), row)
            _tile_call(b, dot, SUMS, X, WEIGHTS)
            _tile_call(b, "tilestored64", SUMS, _pointer(b, sums), row)
            scales, minima = load(b, record, WIDE), load(b, plus(b, record, 64), WIDE)
            for t, total in enumerate(totals):
                scale = b.fmul(scales, splat(b, load(b, plus(b, own, 8 * t), F32), _LANES))
                value = fma(b, b.sitofp(load(b, plus(b, sums, 64 * t), kind), WIDE), scale, b.load(total))
                if fmt != Q8_0:
                    whole = load(b, plus(b, own, 8 * t + 4), F32)
                    value = fma(b, minima, splat(b, whole, _LANES), value)
                b.store(value, total)
        for t, total in enumerate(totals):
            put_outputs(b, b.load(total), b.add(out, b.mul(stride, ir.Constant(I64, t))), factor, bias, adds)

    return square


spread_q4_0, spread_q4_1, spread_q8_0 = (_spread(fmt) for fmt in (Q4_0, Q4_1, Q8_0))
square_q4_0, square_q4_1, square_q8_0 = (_square(fmt) for fmt in (Q4_0, Q4_1, Q8_0))
