"""y = x Wᵀ for the one to eight rows of a decode step, W read once in the bits it is stored in.

Each program owns BLOCK_N rows of W and walks their units (`kernels.planes`), BLOCK_K at a time; a thread holds a unit
of each of its rows, so codes are 128-bit loads and x is used BLOCK_N times from registers. All sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tuning import capability, launch_params
from kernels.gpu.weight_tiles import float_base, format_constants, group_scale, load_scales, slot_code
from kernels.planes import FORMATS, PLAIN
from kernels.reference.quantized import check_product, dequant_gemv_out
from kernels.registry import register

MAX_ROWS = 8
"""Rows of x up to which W is worth decoding without a matrix unit."""


@triton.jit
def _tile_rows(N, SWIGLU: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of W of this program, int64, those past the end replaced by the last; with SWIGLU half gate, half up."""
    r = tl.arange(0, BLOCK_N)
    if SWIGLU:
        HALF: tl.constexpr = BLOCK_N // 2
        n = tl.minimum(tl.program_id(0) * HALF + r % HALF, N // 2 - 1) + (r // HALF) * (N // 2)
    else:
        n = tl.minimum(tl.program_id(0) * BLOCK_N + r, N - 1)
    return n.to(tl.int64)


@triton.jit
def _finish(
    acc, row, bias_ptr, residual_ptr, out_ptr, M, N, residual_stride, out_stride,
    SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] + bias -> silu(gate) * up -> + residual -> out, all in float32, rounded once."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    WIDTH: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    columns = N
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, WIDTH]), (0, 2, 1)))
        acc = gate * tl.sigmoid(gate) * up
        columns = N // 2
    m = tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    valid = (m < M) & (n < columns)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + m * residual_stride + n, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * out_stride + n, acc.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def quantised_gemv_kernel(
    x_ptr, codes_ptr, high_ptr, scales_ptr, sub_ptr, sub_high_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, units, x_stride, residual_stride, out_stride,
    BITS: tl.constexpr, HIGH_BITS: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUB_BITS: tl.constexpr,
    HAS_MIN: tl.constexpr, SWIGLU: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = 128 // BITS
    PER_UNIT: tl.constexpr = UNIT // GROUP if UNIT > GROUP else 1
    PAIRS: tl.constexpr = UNIT // 8 // PER_UNIT
    row = _tile_rows(N, SWIGLU, BLOCK_N)
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
        codes = tl.load(codes_ptr + at, mask=inside[:, :, :, None], other=0, eviction_policy="evict_first")
        high = codes
        if HIGH_BITS > 0:
            high = tl.load(high_ptr + at, mask=inside[:, :, :, None], other=0, eviction_policy="evict_first").to(
                tl.int32
            )
        scales, sub, sub_high = load_scales(
            scales_ptr, sub_ptr, sub_high_ptr, row3, unit[None, None, :], units, inside, BITS, SUB_BITS, HAS_MIN
        )
        x_at = x_ptr + m * x_stride + unit[None, None, :, None] * UNIT + in_pair
        x_mask = ((m < M) | (BLOCK_M == 1)) & inside[:, :, :, None]
        for g in tl.static_range(PER_UNIT):
            scale, minimum = group_scale(scales, sub, sub_high, tl.reshape(base, [1, 1, BLOCK_K]), g, SUB_BITS, HAS_MIN)
            dot = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K, 4], tl.float32)
            total = tl.zeros([BLOCK_M, 1, BLOCK_K, 4], tl.float32)
            for p in tl.static_range(PAIRS):
                x = tl.load(x_at + 8 * (g * PAIRS + p), mask=x_mask, other=0.0).to(tl.float32)
                x0, x1 = tl.split(tl.reshape(x, [BLOCK_M, 1, BLOCK_K, 4, 2]))
                w0 = slot_code(codes, high, base, 2 * (g * PAIRS + p), BITS, HIGH_BITS, OFFSET)
                w1 = slot_code(codes, high, base, 2 * (g * PAIRS + p) + 1, BITS, HIGH_BITS, OFFSET)
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
    _finish(
        tl.sum(acc, 2),
        row,
        bias_ptr,
        residual_ptr,
        out_ptr,
        M,
        N,
        residual_stride,
        out_stride,
        SWIGLU,
        BLOCK_M,
        BLOCK_N,
    )


@triton.jit
def plain_gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, M, N, columns, x_stride, residual_stride, out_stride,
    SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same for a weight that is not quantised; BLOCK_K counts columns."""
    row = _tile_rows(N, SWIGLU, BLOCK_N)
    m = tl.arange(0, BLOCK_M)[:, None, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, columns, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, None, :]
        at = weight_ptr + row[None, :, None] * columns + k
        weight = tl.load(at, mask=k < columns, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = tl.load(x_ptr + m * x_stride + k, mask=(m < M) & (k < columns), other=0.0).to(tl.float32)
        acc += weight * x
    _finish(
        tl.sum(acc, 2),
        row,
        bias_ptr,
        residual_ptr,
        out_ptr,
        M,
        N,
        residual_stride,
        out_stride,
        SWIGLU,
        BLOCK_M,
        BLOCK_N,
    )


def launch_dequant_gemv(
    x: Tensor,
    planes: Sequence[Tensor],
    kind: str,
    bias: Tensor | None,
    residual: Tensor | None,
    swiglu: bool,
    out: Tensor,
) -> None:
    """`kvscope::dequant_gemv`: out [M, N] = x [M, K] Wᵀ (+ bias [N]) (+ residual [M, N]), M at most 8.

    `planes` and `kind` are those of a `PackedWeight`. With `swiglu` W holds the rows of gate and then of up, and out
    [M, N / 2] = silu(gate) * up (+ residual). x, residual and out may be slices of wider rows, and out may be residual.
    Dtypes are float32, float16 or bfloat16. Raises ValueError where shapes don't fit.
    """
    rows, columns = check_product(x, planes, kind, bias, residual, swiglu, out)
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"dequant_gemv takes at most {MAX_ROWS} rows of x, not {x.shape[0]}.")
    block_m = triton.next_power_of_2(x.shape[0])
    params = launch_params(_tuning_name(kind, block_m), capability())
    extent = columns if kind in PLAIN else columns // FORMATS[kind].unit
    block_n = params["BLOCK_N"]
    block_k, num_warps = _step(extent, params["BLOCK_K"], params["num_warps"])
    grid = (triton.cdiv(out.shape[1], block_n // 2 if swiglu else block_n),)
    strides = (x.stride(0), residual.stride(0) if residual is not None else 0, out.stride(0))
    options = {"SWIGLU": swiglu, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": num_warps}
    if kind in PLAIN:
        plain_gemv_kernel[grid](x, *planes, bias, residual, out, x.shape[0], rows, extent, *strides, **options)
    else:
        quantised_gemv_kernel[grid](
            x, *planes, bias, residual, out, x.shape[0], rows, extent, *strides,
            **format_constants(FORMATS[kind]), EVEN=extent % block_k == 0, **options,
        )  # fmt: skip


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
    "(Tensor x, Tensor[] planes, str kind, Tensor? bias, Tensor? residual, bool swiglu, Tensor(a!) out) -> ()",
    launch_dequant_gemv,
    dequant_gemv_out,
)
