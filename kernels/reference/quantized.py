"""Products with quantised weights in plain torch: the definitions of `dequant_gemv` and `dequant_gemm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.planes import FORMATS, PLAIN, PLANES, PackedWeight, dequantise

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}
"""What a gate may go through; GELU in its tanh form."""


def weight_shape(planes: Sequence[Tensor], kind: str) -> tuple[int, int]:
    """Rows and columns of the weight that the planes hold. Raises ValueError for a kind that is not known."""
    if kind in PLAIN:
        return planes[0].shape[0], planes[0].shape[1]
    if kind not in FORMATS:
        raise ValueError(f"Weights of kind {kind} can't be multiplied with.")
    return planes[0].shape[0], planes[0].shape[1] * FORMATS[kind].unit


def weight_parts(planes: Sequence[Tensor], kinds: Sequence[str]) -> tuple[PackedWeight, ...]:
    """The parts of a weight, of the kinds given, whose planes follow each other. Raises ValueError as `weight_shape`,
    and where there are too few or too many planes."""
    counts = [1 if kind in PLAIN else PLANES for kind in kinds]
    if not kinds or sum(counts) != len(planes):
        raise ValueError(f"Weights of kinds {', '.join(kinds)} have {sum(counts)} planes, not {len(planes)}.")
    starts = [0, *accumulate(counts)]
    own = [tuple(planes[start:end]) for start, end in pairwise(starts)]
    return tuple(PackedWeight(kind, *weight_shape(of, kind), of) for kind, of in zip(kinds, own, strict=True))


def check_product(
    x: Tensor,
    planes: Sequence[Tensor],
    kinds: Sequence[str],
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out: Tensor,
) -> tuple[PackedWeight, ...]:
    """W's parts. Raises ValueError where x [M, K], bias [N], residual and out [M, N or N / 2] don't fit."""
    parts = weight_parts(planes, kinds)
    rows, columns = sum(part.rows for part in parts), parts[0].columns
    if activation and activation not in ACTIVATIONS:
        raise ValueError(f"The activation {activation!r} is unknown; it is one of {', '.join(ACTIVATIONS)}, or empty.")
    halves = len(parts) == 1 or (len(parts) == 2 and parts[0].rows == parts[1].rows)
    if activation and (rows % 2 or not halves):
        raise ValueError(f"Gate and up must have as many rows each, not {', '.join(str(p.rows) for p in parts)} rows.")
    expected = (x.shape[0], rows // 2 if activation else rows)
    if any(part.columns != columns for part in parts):
        raise ValueError("All parts of a weight must have the same number of columns.")
    if x.dim() != 2 or x.shape[1] != columns:
        raise ValueError(f"x must be [M, {columns}] for this weight, not {list(x.shape)}.")
    if out.shape != expected or (residual is not None and residual.shape != expected):
        raise ValueError(f"out and residual must be {list(expected)} for this product.")
    if bias is not None and (bias.shape != (rows,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{rows}], not {list(bias.shape)}.")
    if any(t.stride(-1) != 1 for t in (x, out, residual) if t is not None):
        raise ValueError("The rows of x, out and residual must be contiguous.")
    return parts


def dequant_gemv_out(
    x: Tensor,
    planes: Sequence[Tensor],
    kinds: Sequence[str],
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out: Tensor,
) -> None:
    """out = x Wᵀ (+ bias), with `activation` that of the first half times the second, (+ residual); W's parts lie below
    each other. Computed in float32, rounded once."""
    parts = check_product(x, planes, kinds, bias, residual, activation, out)
    weight = torch.cat([dequantise(part) for part in parts])
    result = F.linear(x.float(), weight, None if bias is None else bias.float())
    if activation:
        gate, up = result.chunk(2, dim=-1)
        result = ACTIVATIONS[activation](gate) * up
    out.copy_(result if residual is None else result + residual.float())


def dequant_gemm_out(
    x: Tensor,
    planes: Sequence[Tensor],
    kinds: Sequence[str],
    bias: Tensor | None,
    residual: Tensor | None,
    scratch: Tensor | None,
    out: Tensor,
) -> None:
    """out = x Wᵀ (+ bias) (+ residual) with W rounded to x's dtype, as a matrix unit takes it; sums in float32."""
    parts = check_product(x, planes, kinds, bias, residual, "", out)
    weight = torch.cat([dequantise(part, x.dtype) for part in parts])
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
