"""Weight matrices as quantised blocks of 32, with one kernel family for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import ir as cpu_ir
from kernels.cpu.decode import FUNCTIONS
from kernels.cpu.product import dequantise, dots, project
from kernels.cpu.records import padded, task_rows
from kernels.cpu.team import team

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.int64]]

FORMATS = {"Q4_0": cpu_ir.Q4_0, "Q4_1": cpu_ir.Q4_1, "Q8_0": cpu_ir.Q8_0}
BLOCK = 32
MAX_ROWS = 32  # of activations that go through the kernels; more are cheaper as a dense product
SCRATCH_FLOATS = 1 << 21


def padded_rows(rows: int) -> int:
    return 1 if rows == 1 else -(-rows // cpu_ir.ROW_TILE) * cpu_ir.ROW_TILE


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """weight [rows, columns] = scalar [1] * blocks; `data` uint8 [rows, bytes of a row]; `format` a key of FORMATS.

    `name` is what people see. `columns` that are no multiple of 32 are padded with zeros.
    """

    data: Bytes
    format: str
    columns: int
    name: str
    scalar: np.ndarray[Any, np.dtype[np.float32]] = field(default_factory=lambda: np.ones(1, np.float32))

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    def record(self, bias: int = 0) -> Words:
        """The matrix as kernels take it; `bias` is the address of its float32 bias."""
        blocks = padded(self.columns) // BLOCK
        address, kind, row_bytes = self.data.ctypes.data, FORMATS[self.format], self.data.shape[1]
        words = (address, kind, row_bytes, blocks, self.rows, bias, self.scalar.ctypes.data, dots.address)
        return np.array(words, np.int64)


def from_file(data: Bytes, kind: str, columns: int) -> BlockMatrix:
    """Rows of GGUF blocks, unchanged; `data` is copied."""
    return BlockMatrix(np.array(data, np.uint8, order="C"), kind, columns, f"{kind.lower()} (file)")


def quantise(weight: Tensor) -> BlockMatrix:
    """weight [rows, columns] of any float type as int8, a scale per 32; one factor keeps scales in float16's range."""
    rows, columns = weight.shape
    width = padded(columns)
    data = np.empty((rows, width // BLOCK, 2 + BLOCK), np.uint8)
    largest = float(weight.abs().amax()) / 127
    factor = 2.0 ** math.floor(math.log2(largest)) if math.isfinite(largest) and largest > 0 else 1.0
    step = max(1, SCRATCH_FLOATS // width)
    for first in range(0, rows, step):
        part = F.pad(weight[first : first + step].float() / factor, (0, width - columns))
        part = part.view(-1, width // BLOCK, BLOCK)
        scales = (part.abs().amax(-1, keepdim=True) / 127).half()
        codes = (part / scales.float()).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
        target = data[first : first + step]
        target[:, :, :2] = scales.numpy().view(np.uint8)
        target[:, :, 2:] = codes.numpy().view(np.uint8)
    return BlockMatrix(data.reshape(rows, -1), "Q8_0", columns, "int8", np.array([factor], np.float32))


def dense(matrix: BlockMatrix, first: int, last: int, out: Tensor) -> None:
    """Weight rows first:last into float32 out [last - first, padded columns]."""
    record = matrix.record()
    team().run(dequantise, 1, (record.ctypes.data, first, last, out.data_ptr()), (record, matrix, out))


class BlockLinear:
    """One product for matrices stacked along their outputs. x float32 [T, in] -> float32 [T, out].

    Few rows go through the block kernels, many through torch on dequantised pieces: the same weight values, so the two
    differ by float32 rounding only.
    """

    def __init__(self, parts: Sequence[BlockMatrix], bias: Tensor | None) -> None:
        self.parts = tuple(parts)
        self.rows = sum(part.rows for part in parts)
        self.columns = parts[0].columns
        self.bias = torch.zeros(self.rows) if bias is None else bias.float().contiguous()
        self.nbytes = sum(part.data.nbytes for part in parts)

    @property
    def formats(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of each part."""
        return tuple((part.name, part.data.nbytes) for part in self.parts)

    def records(self) -> list[Words]:
        """The parts as kernels take them, each with its own piece of the bias."""
        starts = np.cumsum([0, *(part.rows for part in self.parts)])
        return [part.record(self.bias.data_ptr() + 4 * int(at)) for part, at in zip(self.parts, starts, strict=False)]

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.rows)
        start = 0
        for part in self.parts:
            bias = self.bias[start : start + part.rows]
            target = out[:, start : start + part.rows]
            if x.shape[0] <= MAX_ROWS:
                _few(part, x, bias, target)
            else:
                _many(part, x, bias, target)
            start += part.rows
        return out


def _few(matrix: BlockMatrix, x: Tensor, bias: Tensor, out: Tensor) -> None:
    count, blocks = padded_rows(x.shape[0]), padded(matrix.columns) // BLOCK
    inputs = np.zeros((count, blocks * BLOCK), np.float32)
    inputs[: x.shape[0], : matrix.columns] = x.numpy()
    result = np.empty((count, matrix.rows), np.float32)
    scratch = np.empty((team().size, count * (blocks + task_rows(matrix.columns))), np.float32)
    record = matrix.record(bias.data_ptr())
    room = (scratch.ctypes.data, scratch.strides[0])
    addresses = (FUNCTIONS.ctypes.data, record.ctypes.data, inputs.ctypes.data, count, *room, result.ctypes.data)
    team().run(project, 1, addresses, (record, matrix, inputs, result, scratch, bias))
    out.copy_(torch.from_numpy(result[: x.shape[0]]))


def _many(matrix: BlockMatrix, x: Tensor, bias: Tensor, out: Tensor) -> None:
    width = padded(matrix.columns)
    step = max(1, SCRATCH_FLOATS // width)
    scratch = _scratch(min(step, matrix.rows) * width)
    for first in range(0, matrix.rows, step):
        last = min(first + step, matrix.rows)
        weight = scratch[: (last - first) * width].view(-1, width)
        dense(matrix, first, last, weight)
        out[:, first:last] = F.linear(x, weight[:, : matrix.columns], bias[first:last])


_kept = torch.empty(0)


def _scratch(size: int) -> Tensor:
    """Reused by all matrices: only the engine's thread multiplies."""
    global _kept
    if _kept.numel() < size:
        _kept = torch.empty(size)
    return _kept
