"""y = x Wᵀ for the one to eight rows of a decode step, W read once in the bits it is stored in.

W is one or more parts, each of its own kind, that lie below each other: all of them take one launch. Each program owns
BLOCK_N rows of a part and walks their units (`kernels.planes`), BLOCK_K at a time; a thread holds a unit of each of its
rows, so codes are 128-bit loads and x is used BLOCK_N times from registers. All sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.swiglu import gated
from kernels.gpu.tuning import capability, launch_params
from kernels.gpu.weight_tiles import field, float_base, group_scale, groups, load_scales, load_unit, slot_code
from kernels.planes import FORMATS, PLAIN, PackedWeight
from kernels.reference.quantized import check_product, dequant_gemv_out
from kernels.registry import register

MAX_ROWS = 8
"""Rows of x up to which W is worth decoding without a matrix unit."""


@triton.constexpr_function
def is_quantised(kind):
    return kind in FORMATS


@triton.jit
def _quantised_dot(
    x_ptr, planes, row, M, units, x_stride,
    KIND: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]: x times rows `row` (int64 [BLOCK_N]) of a part."""
    UNIT: tl.constexpr = field(KIND, "unit")
    PAIRS: tl.constexpr = UNIT // 8 // groups(KIND)
    HAS_MIN: tl.constexpr = field(KIND, "has_min")
    row3 = row[None, :, None]
    m = tl.arange(0, BLOCK_M)[:, None, None, None]
    w = tl.arange(0, 4)
    in_pair = tl.arange(0, 8)[None, None, None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, units, BLOCK_K):
        unit = start + tl.arange(0, BLOCK_K)
        inside = ((unit < units) | EVEN)[None, None, :]  # with EVEN a constant, and the loads are not masked
        base = float_base(unit[None, None, :, None])
        word = unit[None, None, :, None] * 4 + w[None, None, None, :]
        at = row[None, :, None, None] * (units * 4) + word
        codes, high = load_unit(planes[0], planes[1], at, inside[:, :, :, None], KIND, "evict_first")
        scales, sub, sub_high = load_scales(
            planes[2], planes[3], planes[4], row3, unit[None, None, :], units, inside, KIND
        )
        x_at = x_ptr + m * x_stride + unit[None, None, :, None] * UNIT + in_pair
        x_mask = ((m < M) | (BLOCK_M == 1)) & inside[:, :, :, None]
        for g in tl.static_range(groups(KIND)):
            scale, minimum = group_scale(scales, sub, sub_high, tl.reshape(base, [1, 1, BLOCK_K]), g, KIND)
            dot = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K, 4], tl.float32)
            total = tl.zeros([BLOCK_M, 1, BLOCK_K, 4], tl.float32)
            for p in tl.static_range(PAIRS):
                x = tl.load(x_at + 8 * (g * PAIRS + p), mask=x_mask, other=0.0).to(tl.float32)
                x0, x1 = tl.split(tl.reshape(x, [BLOCK_M, 1, BLOCK_K, 4, 2]))
                w0 = slot_code(codes, high, base, 2 * (g * PAIRS + p), KIND)
                w1 = slot_code(codes, high, base, 2 * (g * PAIRS + p) + 1, KIND)
                if BLOCK_M == 1:  # scale sums, which are fewer than codes
                    dot += w0 * x0
                    dot += w1 * x1
                    total += x0 + x1
                else:  # scale codes, which keeps fewer sums in registers
                    w0 = w0 * scale[:, :, :, None] + (minimum[:, :, :, None] if HAS_MIN else 0.0)
                    w1 = w1 * scale[:, :, :, None] + (minimum[:, :, :, None] if HAS_MIN else 0.0)
                    acc += tl.sum(w0 * x0 + w1 * x1, 3)
            if BLOCK_M == 1:
                acc += scale * tl.sum(dot, 3)
                if HAS_MIN:
                    acc += minimum * tl.sum(total, 3)
    return tl.sum(acc, 2)


@triton.jit
def _plain_dot(
    x_ptr, weight_ptr, row, M, columns, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The same for a part that is not quantised; BLOCK_K counts columns."""
    m = tl.arange(0, BLOCK_M)[:, None, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, columns, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, None, :]
        at = weight_ptr + row[None, :, None] * columns + k
        weight = tl.load(at, mask=k < columns, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = tl.load(x_ptr + m * x_stride + k, mask=(m < M) & (k < columns), other=0.0).to(tl.float32)
        acc += weight * x
    return tl.sum(acc, 2)


@triton.jit
def _dot(
    x_ptr, planes, row, M, extent, x_stride, bias_ptr, first_row,
    KIND: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x times rows `row` of the part whose first row is `first_row` of W, + bias."""
    if is_quantised(KIND):
        acc = _quantised_dot(x_ptr, planes, row, M, extent, x_stride, KIND, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        acc = _plain_dot(x_ptr, planes[0], row, M, extent, x_stride, BLOCK_M, BLOCK_N, BLOCK_K)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + first_row + row).to(tl.float32)[None, :]
    return acc


@triton.jit
def _store(
    acc, first, end, residual_ptr, out_ptr, M, residual_stride, out_stride, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr
):
    """acc [BLOCK_M, WIDTH] (+ residual) -> columns `first` to `end` of out, rounded once."""
    m = tl.arange(0, BLOCK_M)[:, None]
    n = first + tl.arange(0, WIDTH)[None, :]
    valid = (m < M) & (n < end)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + m * residual_stride + n, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * out_stride + n, acc.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def dequant_gemv_kernel(
    x_ptr, parts, rows, extents, bias_ptr, residual_ptr, out_ptr, M, x_stride, residual_stride, out_stride,
    KINDS: tl.constexpr, EVEN: tl.constexpr, BLOCKS_N: tl.constexpr, BLOCKS_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program: BLOCKS_N[i] rows of part i, the parts one after the other. Tuples have an entry for each part."""
    pid = tl.program_id(0)
    first, first_row = 0, 0
    for i in tl.static_range(len(KINDS)):
        end = first + tl.cdiv(rows[i], BLOCKS_N[i])
        if len(KINDS) == 1 or ((pid >= first) & (pid < end)):
            start = (pid - first) * BLOCKS_N[i]
            row = tl.minimum(start + tl.arange(0, BLOCKS_N[i]), rows[i] - 1).to(tl.int64)
            acc = _dot(
                x_ptr, parts[i], row, M, extents[i], x_stride, bias_ptr, first_row,
                KINDS[i], EVEN[i], BLOCK_M, BLOCKS_N[i], BLOCKS_K[i],
            )  # fmt: skip
            _store(
                acc, first_row + start, first_row + rows[i], residual_ptr, out_ptr, M, residual_stride, out_stride,
                BLOCK_M, BLOCKS_N[i],
            )  # fmt: skip
        first = end
        first_row += rows[i]


@triton.jit
def gated_gemv_kernel(
    x_ptr, parts, columns, extents, bias_ptr, residual_ptr, out_ptr, M, x_stride, residual_stride, out_stride,
    KINDS: tl.constexpr, EVEN: tl.constexpr, BLOCKS_N: tl.constexpr, BLOCKS_K: tl.constexpr, GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program: WIDTH of the `columns` rows of gate and of up, which are two parts or the halves of one."""
    WIDTH: tl.constexpr = BLOCKS_N[0] // 2
    first = tl.program_id(0) * WIDTH
    if len(KINDS) == 1:  # one tile of both: x is loaded once
        r = tl.arange(0, BLOCKS_N[0])
        row = (tl.minimum(first + r % WIDTH, columns - 1) + (r // WIDTH) * columns).to(tl.int64)
        both = _dot(
            x_ptr, parts[0], row, M, extents[0], x_stride, bias_ptr, 0,
            KINDS[0], EVEN[0], BLOCK_M, BLOCKS_N[0], BLOCKS_K[0],
        )  # fmt: skip
        gate, up = tl.split(tl.permute(tl.reshape(both, [BLOCK_M, 2, WIDTH]), (0, 2, 1)))
    else:
        row = tl.minimum(first + tl.arange(0, WIDTH), columns - 1).to(tl.int64)
        gate = _dot(
            x_ptr, parts[0], row, M, extents[0], x_stride, bias_ptr, 0,
            KINDS[0], EVEN[0], BLOCK_M, WIDTH, BLOCKS_K[0],
        )  # fmt: skip
        up = _dot(
            x_ptr, parts[1], row, M, extents[1], x_stride, bias_ptr, columns,
            KINDS[1], EVEN[1], BLOCK_M, WIDTH, BLOCKS_K[1],
        )  # fmt: skip
    _store(gated(gate, up, GELU), first, columns, residual_ptr, out_ptr, M, residual_stride, out_stride, BLOCK_M, WIDTH)


def launch_dequant_gemv(
    x: Tensor,
    planes: Sequence[Tensor],
    kinds: Sequence[str],
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out: Tensor,
) -> None:
    """`kvscope::dequant_gemv`: out [M, N] = x [M, K] Wᵀ (+ bias [N]) (+ residual [M, N]), M at most 8.

    W's parts of N rows in all are `kinds`, and `planes` those of a `PackedWeight` of each in turn. With `activation`
    "silu" or "gelu" (its tanh form) W holds the rows of gate and then of up, in one part or two, and out [M, N / 2] =
    activation(gate) * up (+ residual). x, residual and out may be slices of wider rows, and out may be residual. Dtypes
    are float32, float16 or bfloat16. Raises ValueError where shapes don't fit.
    """
    parts = check_product(x, planes, kinds, bias, residual, activation, out)
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"dequant_gemv takes at most {MAX_ROWS} rows of x, not {x.shape[0]}.")
    block_m = triton.next_power_of_2(x.shape[0])
    extents = tuple(part.columns if part.kind in PLAIN else part.columns // FORMATS[part.kind].unit for part in parts)
    blocks_n, blocks_k, num_warps = _blocks(parts, extents, block_m)
    planes_of = tuple(part.planes for part in parts)
    pointers = (bias, residual, out)
    sizes = (x.shape[0], x.stride(0), residual.stride(0) if residual is not None else 0, out.stride(0))
    options = {
        "KINDS": tuple(kinds), "BLOCKS_N": blocks_n, "BLOCKS_K": blocks_k, "BLOCK_M": block_m, "num_warps": num_warps,
        "EVEN": tuple(extent % block == 0 for extent, block in zip(extents, blocks_k, strict=True)),
    }  # fmt: skip
    if activation:
        grid = (triton.cdiv(out.shape[1], blocks_n[0] // 2),)
        gated_gemv_kernel[grid](
            x, planes_of, out.shape[1], extents, *pointers, *sizes, GELU=activation == "gelu", **options
        )
    else:
        rows = tuple(part.rows for part in parts)
        programs = sum(triton.cdiv(count, block) for count, block in zip(rows, blocks_n, strict=True))
        dequant_gemv_kernel[(programs,)](x, planes_of, rows, extents, *pointers, *sizes, **options)


def _blocks(
    parts: Sequence[PackedWeight], extents: Sequence[int], block_m: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """BLOCK_N and BLOCK_K of each part, and num_warps, which the part of most rows has to itself."""
    largest = max(range(len(parts)), key=lambda i: parts[i].rows)
    tuned = [launch_params(_tuning_name(part.kind, block_m), capability()) for part in parts]
    own = tuned[largest]
    _, num_warps = _step(extents[largest], own["BLOCK_K"], own["num_warps"])
    blocks_k = tuple(one["BLOCK_K"] * num_warps // one["num_warps"] for one in tuned)
    return tuple(one["BLOCK_N"] for one in tuned), blocks_k, num_warps


def _tuning_name(kind: str, block_m: int) -> str:
    width = "plain" if kind in PLAIN else f"{FORMATS[kind].bits}bit"
    return f"dequant_gemv_{width}" + ("" if block_m == 1 else "_rows")


def _step(extent: int, block_k: int, num_warps: int) -> tuple[int, int]:
    """BLOCK_K and num_warps: the table's, unless more than an eighth of the threads would idle and fewer idle less."""
    sizes = [block_k >> i for i in range(num_warps.bit_length())]
    idle = [triton.cdiv(extent, size) * size - extent for size in sizes]
    best = 0 if idle[0] * 8 <= extent else idle.index(min(idle))
    return sizes[best], num_warps >> best


dequant_gemv = register(
    "dequant_gemv",
    "(Tensor x, Tensor[] planes, str[] kinds, Tensor? bias, Tensor? residual, str activation, Tensor(a!) out) -> ()",
    launch_dequant_gemv,
    dequant_gemv_out,
)
