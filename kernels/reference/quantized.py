"""Products with quantised weights in plain torch: the definitions of `dequant_gemv` and `dequant_gemm`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.planes import FORMATS, PLAIN, PackedWeight, dequantise


def weight_shape(planes: Sequence[Tensor], kind: str) -> tuple[int, int]:
    """Rows and columns of the weight that the planes hold. Raises ValueError for a kind that is not known."""
    if kind in PLAIN:
        return planes[0].shape[0], planes[0].shape[1]
    if kind not in FORMATS:
        raise ValueError(f"Weights of kind {kind} can't be multiplied with.")
    return planes[0].shape[0], planes[0].shape[1] * FORMATS[kind].unit


def check_product(
    x: Tensor,
    planes: Sequence[Tensor],
    kind: str,
    bias: Tensor | None,
    residual: Tensor | None,
    swiglu: bool,
    out: Tensor,
) -> tuple[int, int]:
    """Rows and columns of W. Raises ValueError where x [M, K], bias [N], residual and out [M, N or N / 2] don't fit."""
    rows, columns = weight_shape(planes, kind)
    expected = (x.shape[0], rows // 2 if swiglu else rows)
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"x must be [M, {columns}] for this weight, not {list(x.shape)}.")
    if swiglu and rows % 2:
        raise ValueError(f"Gate and up must have as many rows each, which {rows} rows do not allow.")
    if out.shape != expected or (residual is not None and residual.shape != expected):
        raise ValueError(f"out and residual must be {list(expected)} for this product.")
    if bias is not None and (bias.shape != (rows,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{rows}], not {list(bias.shape)}.")
    if any(t.stride(-1) != 1 for t in (x, out, residual) if t is not None):
        raise ValueError("The rows of x, out and residual must be contiguous.")
    return rows, columns


def dequant_gemv_out(
    x: Tensor,
    planes: Sequence[Tensor],
    kind: str,
    bias: Tensor | None,
    residual: Tensor | None,
    swiglu: bool,
    out: Tensor,
) -> None:
    """out = x Wᵀ (+ bias), with `swiglu` silu(first half) * second half of it, (+ residual); float32, rounded once."""
    rows, columns = check_product(x, planes, kind, bias, residual, swiglu, out)
    weight = dequantise(PackedWeight(kind, rows, columns, tuple(planes)))
    result = F.linear(x.float(), weight, None if bias is None else bias.float())
    if swiglu:
        gate, up = result.chunk(2, dim=-1)
        result = F.silu(gate) * up
    out.copy_(result if residual is None else result + residual.float())


def dequant_gemm_out(
    x: Tensor,
    planes: Sequence[Tensor],
    kind: str,
    bias: Tensor | None,
    residual: Tensor | None,
    scratch: Tensor | None,
    out: Tensor,
) -> None:
    """out = x Wᵀ (+ bias) (+ residual) with W rounded to x's dtype, as a matrix unit takes it; sums in float32."""
    rows, columns = check_product(x, planes, kind, bias, residual, False, out)
    weight = dequantise(PackedWeight(kind, rows, columns, tuple(planes)), x.dtype)
    result = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    out.copy_(result if residual is None else result + residual.float())


def check_rows(planes: Sequence[Tensor], kind: str, ids: Tensor | None, out: Tensor) -> None:
    """Raises ValueError where ids int64 [M] and out [M, K] (without ids [N, K]) don't fit the weight."""
    rows, columns = weight_shape(planes, kind)
    if ids is not None and (ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous()):
        raise ValueError(f"ids must be a contiguous int64 [M], not {ids.dtype} {list(ids.shape)}.")
    expected = (rows if ids is None else ids.shape[0], columns)
    if out.shape != expected or out.stride(-1) != 1:
        raise ValueError(f"out must be {list(expected)} with contiguous rows, not {list(out.shape)}.")


def dequant_rows_out(planes: Sequence[Tensor], kind: str, ids: Tensor | None, out: Tensor) -> None:
    """out [M, K] = the weight's rows `ids`, or all of them, computed in float32 and rounded once to out's dtype."""
    check_rows(planes, kind, ids, out)
    if ids is not None:
        planes = [plane[ids] if plane.numel() else plane for plane in planes]
    out.copy_(dequantise(PackedWeight(kind, out.shape[0], out.shape[1], tuple(planes))))
