"""Rows of a quantised weight as numbers: an embedding's lookup, or all of W for a matrix product that can't decode."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tuning import capability, launch_params
from kernels.gpu.weight_tiles import field, float_base, group_scale, groups, load_scales, load_unit, slot_code
from kernels.planes import FORMATS, PLAIN
from kernels.reference.quantized import check_rows, dequant_rows_out
from kernels.registry import register


@triton.jit
def dequant_rows_kernel(
    codes_ptr, high_ptr, scales_ptr, sub_ptr, sub_high_ptr, ids_ptr, out_ptr, M, units, out_stride,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (rows, units): BLOCK_M rows of out, BLOCK_K units of each."""
    UNIT: tl.constexpr = field(KIND, "unit")
    PAIRS: tl.constexpr = UNIT // 8 // groups(KIND)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    unit = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = m
    if ids_ptr is not None:
        row = tl.load(ids_ptr + m, mask=m < M, other=0)
    inside = (m < M)[:, None] & (unit < units)[None, :]
    word = row[:, None, None] * (units * 4) + unit[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    codes, high = load_unit(codes_ptr, high_ptr, word, inside[:, :, None], KIND, "")
    base = float_base(unit)
    scales, sub, sub_high = load_scales(
        scales_ptr, sub_ptr, sub_high_ptr, row[:, None], unit[None, :], units, inside, KIND
    )
    at = out_ptr + m[:, None, None] * out_stride + unit[None, :, None] * UNIT + tl.arange(0, 8)[None, None, :]
    for g in tl.static_range(groups(KIND)):
        scale, minimum = group_scale(scales, sub, sub_high, base[None, :], g, KIND)
        for p in tl.static_range(PAIRS):
            w0 = slot_code(codes, high, base[None, :, None], 2 * (g * PAIRS + p), KIND)
            w1 = slot_code(codes, high, base[None, :, None], 2 * (g * PAIRS + p) + 1, KIND)
            values = tl.reshape(tl.join(w0, w1), [BLOCK_M, BLOCK_K, 8]) * scale[:, :, None]
            if field(KIND, "has_min"):
                values += minimum[:, :, None]
            tl.store(at + 8 * (g * PAIRS + p), values.to(out_ptr.dtype.element_ty), mask=inside[:, :, None])


def launch_dequant_rows(planes: Sequence[Tensor], kind: str, ids: Tensor | None, out: Tensor) -> None:
    """`kvscope::dequant_rows`: out [M, K] = W[ids], or all of W without ids; int64 ids [M], all of them rows of W.

    `planes` and `kind` are those of a `PackedWeight`; out is float32, float16 or bfloat16. Raises ValueError where
    shapes don't fit.
    """
    check_rows(planes, kind, ids, out)
    if kind in PLAIN:
        dequant_rows_out(planes, kind, ids, out)
        return
    params = launch_params("dequant_rows", capability())
    units = out.shape[1] // FORMATS[kind].unit
    block_m, block_k = params["BLOCK_M"], params["BLOCK_K"]
    grid = (triton.cdiv(out.shape[0], block_m), triton.cdiv(units, block_k))
    dequant_rows_kernel[grid](
        *planes, ids, out, out.shape[0], units, out.stride(0), KIND=kind,
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=params["num_warps"],
    )  # fmt: skip


dequant_rows = register(
    "dequant_rows",
    "(Tensor[] planes, str kind, Tensor? ids, Tensor(a!) out) -> ()",
    launch_dequant_rows,
    dequant_rows_out,
)
