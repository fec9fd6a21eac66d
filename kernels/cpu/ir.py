"""Vector code that numba has no words for: memory by address, exp, atomics, calls.

Each intrinsic takes addresses and sizes as int64 and is written as LLVM vector code, which LLVM fits to the processor.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

Q4_0, Q4_1, Q8_0 = 0, 1, 2

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
V8 = ir.VectorType(F32, 8)
WIDTH = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
"""Numbers that attention takes at once."""
WIDE = ir.VectorType(F32, WIDTH)
Value = Any


def emits(arguments: str, result: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic whose arguments are int64 ("i") or float32 ("f"); the function gets the builder and their values."""
    kinds = [types.int64 if kind == "i" else types.float32 for kind in arguments]
    names = ", ".join(f"a{i}" for i in range(len(arguments)))

    def wrap(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            out = emit(builder, *values)
            return context.get_dummy_value() if result is types.void else out

        # numba finds an intrinsic's arity in its signature, so that has to be spelled out.
        scope: dict[str, Any] = {"found": (result(*kinds), codegen)}
        exec(f"def {emit.__name__}(typingctx, {names}):\n    return found", scope)
        return intrinsic(scope[emit.__name__])

    return wrap


def load(b: Any, address: Value, kind: Any, align: int = 1) -> Value:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


def store(b: Any, value: Value, address: Value, align: int = 1) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=align)


def plus(b: Any, address: Value, count: Value | int, size: int = 1) -> Value:
    count = ir.Constant(I64, count) if isinstance(count, int) else count
    return b.add(address, b.mul(count, ir.Constant(I64, size)))


def fma(b: Any, x: Value, y: Value, z: Value) -> Value:
    kind = x.type
    name = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.{name}")
    return b.call(function, (x, y, z))


def llvm_call(b: Any, name: str, result: Any, *values: Value) -> Value:
    """An LLVM intrinsic."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values)


def splat(b: Any, value: Value, count: int) -> Value:
    vector = b.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, count), [0] * count))


def constant(value: float, kind: Any) -> Value:
    return ir.Constant(kind, [value] * kind.count)


def _half(b: Any, vector: Value, upper: bool) -> Value:
    count = vector.type.count // 2
    lanes = ir.Constant(ir.VectorType(I32, count), [i + count * upper for i in range(count)])
    return b.shuffle_vector(vector, vector, lanes)


def sum_of(b: Any, vector: Value) -> Value:
    """Neighbours first, then neighbouring sums, and so on."""
    while vector.type.count > 1:
        count = vector.type.count // 2
        lanes = [ir.Constant(ir.VectorType(I32, count), [2 * i + odd for i in range(count)]) for odd in (0, 1)]
        vector = b.fadd(*(b.shuffle_vector(vector, vector, lane) for lane in lanes))
    return b.extract_element(vector, ir.Constant(I32, 0))


def max_of(b: Any, vector: Value) -> Value:
    """NaN among the lanes may be passed over."""
    while vector.type.count > 1:
        low, high = _half(b, vector, False), _half(b, vector, True)
        vector = b.select(b.fcmp_ordered(">", low, high), low, high)
    return b.extract_element(vector, ir.Constant(I32, 0))


def variable(b: Any, value: Value) -> Value:
    place = cgutils.alloca_once(b, value.type)
    b.store(value, place)
    return place


# exp(r) for |r| <= ln(2) / 2, Taylor terms from the highest; the error stays below 2e-7 of the value.
_EXP_TERMS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)


def exp(b: Any, x: Value) -> Value:
    """exp of a vector; 0 below -87, infinity above 88, NaN stays NaN."""
    kind = x.type
    ints = ir.VectorType(I32, kind.count)
    tiny, huge = (b.fcmp_ordered(sign, x, constant(bound, kind)) for sign, bound in (("<", -87.0), (">", 88.0)))
    x = b.select(tiny, constant(-87.0, kind), b.select(huge, constant(88.0, kind), x))
    turns = fma(b, x, constant(1.4426950408889634, kind), constant(0.5, kind))
    turns = llvm_call(b, f"llvm.floor.v{kind.count}f32", kind, turns)
    rest = fma(b, turns, constant(-0.693359375, kind), x)
    rest = fma(b, turns, constant(2.12194440e-4, kind), rest)
    value = constant(_EXP_TERMS[0], kind)
    for term in _EXP_TERMS[1:]:
        value = fma(b, value, rest, constant(term, kind))
    power = b.shl(b.add(b.fptosi(turns, ints), constant(127, ints)), constant(23, ints))
    value = b.select(tiny, constant(0.0, kind), b.fmul(value, b.bitcast(power, kind)))
    return b.select(huge, constant(float("inf"), kind), value)


@emits("iif", types.float32)
def exp_sum(b: Any, values: Value, count: Value, largest: Value) -> Value:
    """values[i] = exp(values[i] - largest) in place, `count` a multiple of WIDTH; returns their sum. NaN stays NaN."""
    total = variable(b, constant(0.0, WIDE))
    b.store(constant(0.0, WIDE), total)
    with cgutils.for_range(b, b.udiv(count, ir.Constant(I64, WIDTH)), intp=I64) as loop:
        place = plus(b, values, loop.index, 4 * WIDTH)
        value = exp(b, b.fsub(load(b, place, WIDE), splat(b, largest, WIDTH)))
        store(b, value, place)
        b.store(b.fadd(b.load(total), value), total)
    return sum_of(b, b.load(total))


@emits("iiffi")
def survey(b: Any, values: Value, count: Value, largest: Value, mine: Value, out: Value) -> None:
    """out float32 [3] = sum of exp(x - largest), sum of exp(x - largest) * (x - largest), how many exceed `mine`;
    `count` is a multiple of WIDTH."""
    sums = [variable(b, constant(0.0, WIDE)) for _ in range(3)]
    for total in sums:
        b.store(constant(0.0, WIDE), total)
    with cgutils.for_range(b, b.udiv(count, ir.Constant(I64, WIDTH)), intp=I64) as loop:
        value = load(b, plus(b, values, loop.index, 4 * WIDTH), WIDE)
        shifted = b.fsub(value, splat(b, largest, WIDTH))
        weight = exp(b, shifted)
        more = b.select(b.fcmp_ordered(">", value, splat(b, mine, WIDTH)), constant(1.0, WIDE), constant(0.0, WIDE))
        for total, part in zip(sums, (weight, b.fmul(weight, shifted), more), strict=True):
            b.store(b.fadd(b.load(total), part), total)
    for i, total in enumerate(sums):
        store(b, sum_of(b, b.load(total)), plus(b, out, 4 * i))


@emits("ii", types.float32)
def zero_or_nan(b: Any, values: Value, count: Value) -> Value:
    """0 if all are finite, else NaN; `count` is a multiple of WIDTH."""
    total = variable(b, constant(0.0, WIDE))
    b.store(constant(0.0, WIDE), total)
    with cgutils.for_range(b, b.udiv(count, ir.Constant(I64, WIDTH)), intp=I64) as loop:
        value = load(b, plus(b, values, loop.index, 4 * WIDTH), WIDE)
        b.store(fma(b, value, constant(0.0, WIDE), b.load(total)), total)
    return sum_of(b, b.load(total))


@emits("ii", types.int64)
def word(b: Any, address: Value, index: Value) -> Value:
    """int64 number `index` at an address."""
    return load(b, plus(b, address, index, 8), I64, 8)


@emits("ii", types.int64)
def word32(b: Any, address: Value, index: Value) -> Value:
    """int32 number `index` at an address."""
    return b.sext(load(b, plus(b, address, index, 4), I32, 4), I64)


@emits("ii", types.float32)
def get(b: Any, address: Value, index: Value) -> Value:
    """float32 number `index` at an address."""
    return load(b, plus(b, address, index, 4), F32, 4)


@emits("iif")
def put(b: Any, address: Value, index: Value, value: Value) -> None:
    store(b, value, plus(b, address, index, 4), 4)


@emits("iii")
def put_word(b: Any, address: Value, index: Value, value: Value) -> None:
    store(b, value, plus(b, address, index, 8), 8)


@emits("ii", types.int64)
def fetch_add(b: Any, address: Value, amount: Value) -> Value:
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), amount, "acq_rel")


@emits("i", types.int64)
def load_acquire(b: Any, address: Value) -> Value:
    return b.load_atomic(b.inttoptr(address, I64.as_pointer()), "acquire", 8)


def prefetch_line(b: Any, address: Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    # To be read, into the second cache, data: to the nearest one too few lines can be on their way.
    options = [ir.Constant(I32, value) for value in (0, 2, 1)]
    b.call(function, [b.inttoptr(address, I8.as_pointer()), *options])


@emits("i")
def pause(b: Any, ignored: Value) -> None:
    """Tell the processor that a loop waits."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"), ())


def _call(arguments: int) -> Any:
    @emits("i" * (arguments + 1), types.int64)
    def call(b: Any, address: Value, *values: Value) -> Value:
        kind = ir.FunctionType(I64, [I64] * arguments)
        return b.call(b.inttoptr(address, kind.as_pointer()), values)

    return call


call_4, call_5, call_6, call_7, call_8, call_9, call_10 = (_call(n) for n in range(4, 11))
