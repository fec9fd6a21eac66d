"""Matrix products and an embedding over weights in planes: one launch for each run of parts of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from kernels.gpu.dequant_gemm import dequant_gemm, needs_scratch
from kernels.gpu.dequant_gemv import MAX_ROWS, dequant_gemv
from kernels.gpu.dequant_rows import dequant_rows
from kernels.gpu.swiglu import geglu, swiglu
from kernels.planes import FORMATS, PackedWeight, stack


class PlaneLinear:
    """x [T, columns] times the rows of all parts, with a bias [rows] or none. Up to MAX_ROWS tokens take the GEMV."""

    def __init__(self, parts: Sequence[PackedWeight], bias: Tensor | None) -> None:
        self.parts = tuple(stack(tuple(run)) for _, run in groupby(parts, lambda part: part.kind))
        self.bias = bias
        self.rows = sum(part.rows for part in self.parts)
        self.nbytes = sum(part.nbytes for part in self.parts)

    @property
    def formats(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of each quantised part."""
        return tuple((part.kind.lower(), part.nbytes) for part in self.parts if part.kind in FORMATS)

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.rows)
        self._into(x, out, None)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [T, rows] += the product, in place."""
        self._into(x, residual, residual)

    def gated(self, x: Tensor, gelu: bool = False) -> Tensor:
        """silu or gelu(first half of the rows) * second half, [T, rows / 2]."""
        out = x.new_empty(len(x), self.rows // 2)
        if gelu:
            geglu(self(x), out)
        elif len(x) <= MAX_ROWS and len(self.parts) == 1:
            only = self.parts[0]
            dequant_gemv(x, list(only.planes), only.kind, self.bias, None, True, out)
        else:
            swiglu(self(x), out)
        return out

    def _into(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        start = 0
        for part in self.parts:
            span = slice(start, start + part.rows)
            bias = None if self.bias is None else self.bias[span]
            rest = None if residual is None else residual[:, span]
            if len(x) <= MAX_ROWS:
                dequant_gemv(x, list(part.planes), part.kind, bias, rest, False, out[:, span])
            else:
                scratch = None
                if needs_scratch(part.kind, x.dtype):
                    scratch = x.new_empty(part.rows, part.columns)
                dequant_gemm(x, list(part.planes), part.kind, bias, rest, scratch, out[:, span])
            start += part.rows


class PlaneEmbedding:
    """Rows of a weight by token id, decoded on the device."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes
        self._dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        planes = self.weight.planes
        out = torch.empty(len(token_ids), self.weight.columns, dtype=self._dtype, device=planes[0].device)
        dequant_rows(list(planes), self.weight.kind, token_ids, out)
        return out
