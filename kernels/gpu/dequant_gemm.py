"""out = x Wᵀ for the many rows of a prefill: tiles of a quantised W are decoded in registers, for a matrix unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.dequant_rows import launch_dequant_rows
from kernels.gpu.tuning import capability, launch_params
from kernels.gpu.weight_tiles import field, float_base, group_scale, groups, load_scales, load_unit, slot_code
from kernels.planes import FORMATS, PLAIN, PackedWeight
from kernels.reference.quantized import check_product, dequant_gemm_out
from kernels.registry import register


@triton.jit
def _tile(
    x_row, planes, row, units,
    KIND: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]: the rows of x at `x_row` times rows `row` of a part.

    A dot takes eight columns, a pair of slots, of each of BLOCK_K units. Their order in it is the units', for W and x
    alike, so W needs no shuffle.
    """
    UNIT: tl.constexpr = field(KIND, "unit")
    PAIRS: tl.constexpr = UNIT // 8 // groups(KIND)
    k = tl.arange(0, BLOCK_K * 8)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, units, BLOCK_K):
        unit = start + tl.arange(0, BLOCK_K)
        inside = ((unit < units) | EVEN)[None, :]  # with EVEN a constant, and the loads are not masked
        word = row[:, None, None] * (units * 4) + unit[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        codes, high = load_unit(planes[0], planes[1], word, inside[:, :, None], KIND, "")
        base = float_base(unit)
        scales, sub, sub_high = load_scales(
            planes[2], planes[3], planes[4], row[:, None], unit[None, :], units, inside, KIND
        )
        x_at = x_row + ((start + k // 8) * UNIT + k % 8)[None, :]
        x_inside = ((start + k // 8 < units) | EVEN)[None, :]
        for g in tl.static_range(groups(KIND)):
            scale, minimum = group_scale(scales, sub, sub_high, base[None, :], g, KIND)
            for p in tl.static_range(PAIRS):
                w0 = slot_code(codes, high, base[None, :, None], 2 * (g * PAIRS + p), KIND)
                w1 = slot_code(codes, high, base[None, :, None], 2 * (g * PAIRS + p) + 1, KIND)
                w = tl.join(w0, w1) * scale[:, :, None, None]
                if field(KIND, "has_min"):
                    w += minimum[:, :, None, None]
                w = tl.reshape(w.to(x_row.dtype.element_ty), [BLOCK_N, BLOCK_K * 8])
                x = tl.load(x_at + 8 * (g * PAIRS + p), mask=x_inside, other=0.0)
                acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def dequant_gemm_kernel(
    x_ptr, parts, rows, units, bias_ptr, residual_ptr, out_ptr, M, x_stride, residual_stride, out_stride,
    KINDS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS_K: tl.constexpr,
):  # fmt: skip
    """Program (rows of x, rows of a part of W), the parts one after the other. Tuples have an entry for each part."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    pid = tl.program_id(1)
    x_row = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride
    m64 = m.to(tl.int64)[:, None]
    first, first_row = 0, 0
    for i in tl.static_range(len(KINDS)):
        end = first + tl.cdiv(rows[i], BLOCK_N)
        if len(KINDS) == 1 or ((pid >= first) & (pid < end)):
            own = (pid - first) * BLOCK_N + tl.arange(0, BLOCK_N)
            row = tl.minimum(own, rows[i] - 1).to(tl.int64)
            acc = _tile(x_row, parts[i], row, units[i], KINDS[i], EVEN[i], BLOCK_M, BLOCK_N, BLOCKS_K[i])
            n = (first_row + own)[None, :]
            valid = (m < M)[:, None] & (own < rows[i])[None, :]
            if bias_ptr is not None:
                acc += tl.load(bias_ptr + first_row + row).to(tl.float32)[None, :]
            if residual_ptr is not None:
                acc += tl.load(residual_ptr + m64 * residual_stride + n, mask=valid, other=0.0).to(tl.float32)
            tl.store(out_ptr + m64 * out_stride + n, acc.to(out_ptr.dtype.element_ty), mask=valid)
        first = end
        first_row += rows[i]


def needs_scratch(kinds: Sequence[str], dtype: torch.dtype) -> bool:
    """Whether `dequant_gemm` must be given a scratch [N, K] for x of `dtype` and parts of `kinds` on the current card.

    Triton has no matrix products of float32, nor any before compute capability 8.0: there W is decoded into the
    scratch and torch multiplies, as it does where plain parts lie beside quantised ones.
    """
    if any(kind in PLAIN for kind in kinds):
        return len(kinds) > 1 or PLAIN[kinds[0]] != dtype
    return dtype == torch.float32 or capability() < 80


def launch_dequant_gemm(
    x: Tensor,
    planes: Sequence[Tensor],
    kinds: Sequence[str],
    bias: Tensor | None,
    residual: Tensor | None,
    scratch: Tensor | None,
    out: Tensor,
) -> None:
    """`kvscope::dequant_gemm`: out [M, N] = x [M, K] Wᵀ (+ bias [N]) (+ residual [M, N]), W rounded to x's dtype.

    `planes` and `kinds` as for `dequant_gemv`. With `scratch` [N, K] of x's dtype W is decoded into it first and torch
    multiplies; see `needs_scratch` for when that must be. x, residual and out may be slices of wider rows, and out may
    be residual. Dtypes are float32, float16 or bfloat16, out's and residual's that of x where torch multiplies. Raises
    ValueError where shapes don't fit or a scratch is needed.
    """
    parts = check_product(x, planes, kinds, bias, residual, "", out)
    shape = (sum(part.rows for part in parts), parts[0].columns)
    if scratch is None and needs_scratch(kinds, x.dtype):
        named = ", ".join(kinds)
        raise ValueError(f"A product of {x.dtype} with {named} needs a scratch for the decoded weight on this card.")
    if scratch is not None and (scratch.shape != shape or scratch.dtype != x.dtype):
        raise ValueError(f"The scratch must be {list(shape)} of {x.dtype}, not {list(scratch.shape)}.")
    if scratch is not None:
        for part, into in zip(parts, scratch.split([part.rows for part in parts]), strict=True):
            launch_dequant_rows(part.planes, part.kind, None, into)
        _multiply(x, scratch, bias, residual, out)
    elif kinds[0] in PLAIN:
        _multiply(x, planes[0], bias, residual, out)
    else:
        _launch(x, parts, bias, residual, out)


def _launch(
    x: Tensor, parts: Sequence[PackedWeight], bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    tuned = [launch_params(f"dequant_gemm_{FORMATS[part.kind].bits}bit", capability()) for part in parts]
    units = tuple(part.columns // FORMATS[part.kind].unit for part in parts)
    blocks_k = tuple(one["BLOCK_K"] for one in tuned)
    shared = min(tuned, key=lambda one: one["BLOCK_M"])  # parts have one grid
    block_m, block_n = shared["BLOCK_M"], shared["BLOCK_N"]
    grid = (triton.cdiv(len(x), block_m), sum(triton.cdiv(part.rows, block_n) for part in parts))
    dequant_gemm_kernel[grid](
        x, tuple(part.planes for part in parts), tuple(part.rows for part in parts), units, bias, residual, out,
        len(x), x.stride(0), residual.stride(0) if residual is not None else 0, out.stride(0),
        KINDS=tuple(part.kind for part in parts), BLOCK_M=block_m, BLOCK_N=block_n, BLOCKS_K=blocks_k,
        EVEN=tuple(extent % block == 0 for extent, block in zip(units, blocks_k, strict=True)),
        num_warps=shared["num_warps"], num_stages=shared["STAGES"],
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
    "(Tensor x, Tensor[] planes, str[] kinds, Tensor? bias, Tensor? residual, Tensor(a!)? scratch, "
    "Tensor(b!) out) -> ()",
    launch_dequant_gemm,
    dequant_gemm_out,
)
