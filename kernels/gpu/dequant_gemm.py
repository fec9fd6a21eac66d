"""out = x Wᵀ for the many rows of a prefill: tiles of a quantised W are decoded in registers, for a matrix unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.dequant_rows import launch_dequant_rows
from kernels.gpu.tuning import capability, launch_params
from kernels.gpu.weight_tiles import float_base, format_constants, group_scale, load_scales, slot_code
from kernels.planes import FORMATS, PLAIN
from kernels.reference.quantized import check_product, dequant_gemm_out
from kernels.registry import register


@triton.jit
def dequant_gemm_kernel(
    x_ptr, codes_ptr, high_ptr, scales_ptr, sub_ptr, sub_high_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, units, x_stride, residual_stride, out_stride,
    BITS: tl.constexpr, HIGH_BITS: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SUB_BITS: tl.constexpr,
    HAS_MIN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (rows of x, rows of W). A dot takes eight columns, a pair of slots, of each of BLOCK_K units.

    The order of columns in a dot is the units', for W and x alike, so W needs no shuffle.
    """
    UNIT: tl.constexpr = 128 // BITS
    PER_UNIT: tl.constexpr = UNIT // GROUP if UNIT > GROUP else 1
    PAIRS: tl.constexpr = UNIT // 8 // PER_UNIT
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    x_row = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride
    k = tl.arange(0, BLOCK_K * 8)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, units, BLOCK_K):
        unit = start + tl.arange(0, BLOCK_K)
        inside = ((unit < units) | EVEN)[None, :]  # with EVEN a constant, and the loads are not masked
        word = row[:, None, None] * (units * 4) + unit[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        codes = tl.load(codes_ptr + word, mask=inside[:, :, None], other=0)
        high = codes
        if HIGH_BITS > 0:
            high = tl.load(high_ptr + word, mask=inside[:, :, None], other=0).to(tl.int32)
        base = float_base(unit)
        scales, sub, sub_high = load_scales(
            scales_ptr, sub_ptr, sub_high_ptr, row[:, None], unit[None, :], units, inside, BITS, SUB_BITS, HAS_MIN
        )
        x_at = x_row + ((start + k // 8) * UNIT + k % 8)[None, :]
        x_inside = ((start + k // 8 < units) | EVEN)[None, :]
        for g in tl.static_range(PER_UNIT):
            scale, minimum = group_scale(scales, sub, sub_high, base[None, :], g, SUB_BITS, HAS_MIN)
            for p in tl.static_range(PAIRS):
                w0 = slot_code(codes, high, base[None, :, None], 2 * (g * PAIRS + p), BITS, HIGH_BITS, OFFSET)
                w1 = slot_code(codes, high, base[None, :, None], 2 * (g * PAIRS + p) + 1, BITS, HIGH_BITS, OFFSET)
                w = tl.join(w0, w1) * scale[:, :, None, None]
                if HAS_MIN:
                    w += minimum[:, :, None, None]
                w = tl.reshape(w.to(x_ptr.dtype.element_ty), [BLOCK_N, BLOCK_K * 8])
                x = tl.load(x_at + 8 * (g * PAIRS + p), mask=x_inside, other=0.0)
                acc = tl.dot(x, tl.trans(w), acc)
    valid = (m < M)[:, None] & (n < N)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    m64 = m.to(tl.int64)[:, None]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + m64 * residual_stride + n[None, :], mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + m64 * out_stride + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid)


def needs_scratch(kind: str, dtype: torch.dtype) -> bool:
    """Whether `dequant_gemm` must be given a scratch [N, K] for x of `dtype` on the current card.

    Triton has no matrix products of float32, nor any before compute capability 8.0: there W is decoded into the
    scratch and torch multiplies.
    """
    return PLAIN[kind] != dtype if kind in PLAIN else dtype == torch.float32 or capability() < 80


def launch_dequant_gemm(
    x: Tensor,
    planes: Sequence[Tensor],
    kind: str,
    bias: Tensor | None,
    residual: Tensor | None,
    scratch: Tensor | None,
    out: Tensor,
) -> None:
    """`kvscope::dequant_gemm`: out [M, N] = x [M, K] Wᵀ (+ bias [N]) (+ residual [M, N]), W rounded to x's dtype.

    `planes` and `kind` are those of a `PackedWeight`. With `scratch` [N, K] of x's dtype W is decoded into it first and
    torch multiplies; see `needs_scratch` for when that must be. x, residual and out may be slices of wider rows, and
    out may be residual. Dtypes are float32, float16 or bfloat16, out's and residual's that of x where torch multiplies.
    Raises ValueError where shapes don't fit or a scratch is needed.
    """
    rows, columns = check_product(x, planes, kind, bias, residual, False, out)
    if scratch is None and needs_scratch(kind, x.dtype):
        raise ValueError(f"A product of {x.dtype} with {kind} needs a scratch for the decoded weight on this card.")
    if scratch is not None and (scratch.shape != (rows, columns) or scratch.dtype != x.dtype):
        raise ValueError(f"The scratch must be [{rows}, {columns}] of {x.dtype}, not {list(scratch.shape)}.")
    if kind in PLAIN and PLAIN[kind] == x.dtype:
        _multiply(x, planes[0], bias, residual, out)
    elif scratch is not None:
        launch_dequant_rows(planes, kind, None, scratch)
        _multiply(x, scratch, bias, residual, out)
    else:
        _launch_tiles(x, planes, kind, bias, residual, out)


def _launch_tiles(
    x: Tensor, planes: Sequence[Tensor], kind: str, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    fmt = FORMATS[kind]
    units, (rows, width) = x.shape[1] // fmt.unit, out.shape
    params = launch_params(f"dequant_gemm_{fmt.bits}bit", capability())
    block_m, block_n, block_k = params["BLOCK_M"], params["BLOCK_N"], params["BLOCK_K"]
    grid = (triton.cdiv(rows, block_m), triton.cdiv(width, block_n))
    dequant_gemm_kernel[grid](
        x, *planes, bias, residual, out, rows, width, units,
        x.stride(0), residual.stride(0) if residual is not None else 0, out.stride(0),
        **format_constants(fmt), EVEN=units % block_k == 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=params["num_warps"], num_stages=params["STAGES"],
    )  # fmt: skip


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    if residual is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(residual, x, weight.T, out=out)
    if bias is not None:
        out.add_(bias)


dequant_gemm = register(
    "dequant_gemm",
    "(Tensor x, Tensor[] planes, str kind, Tensor? bias, Tensor? residual, Tensor(a!)? scratch, Tensor(b!) out) -> ()",
    launch_dequant_gemm,
    dequant_gemm_out,
)
