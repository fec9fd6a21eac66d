"""Matrix products and an embedding over weights in planes: one launch whatever kinds the parts of a weight are of."""

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
        self.columns = self.parts[0].columns
        self.nbytes = sum(part.nbytes for part in self.parts)
        self._kinds = [part.kind for part in self.parts]
        self._planes = [plane for part in self.parts for plane in part.planes]

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

    def gated(self, x: Tensor, activation: str = "silu") -> Tensor:
        """activation(first half of the rows) * second half, [T, rows / 2]; "silu" or "gelu"."""
        out = x.new_empty(len(x), self.rows // 2)
        if len(x) <= MAX_ROWS:
            dequant_gemv(x, self._planes, self._kinds, self.bias, None, activation, out)
        else:
            (geglu if activation == "gelu" else swiglu)(self(x), out)
        return out

    def _into(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        if len(x) <= MAX_ROWS:
            dequant_gemv(x, self._planes, self._kinds, self.bias, residual, "", out)
            return
        scratch = x.new_empty(self.rows, self.columns) if needs_scratch(self._kinds, x.dtype) else None
        dequant_gemm(x, self._planes, self._kinds, self.bias, residual, scratch, out)


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
