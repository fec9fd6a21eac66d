"""Weight matrices as quantised blocks of 32, in panels of eight rows (`panel_ir`)."""

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
from kernels.cpu import records as rec
from kernels.cpu.amx import SPREAD_BYTES
from kernels.cpu.functions import FUNCTIONS
from kernels.cpu.panel_ir import PANEL
from kernels.cpu.product import dots, project, tile_product_address
from kernels.cpu.slabs import Slabs
from kernels.cpu.team import team

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.int64]]

FORMATS = {"Q4_0": cpu_ir.Q4_0, "Q4_1": cpu_ir.Q4_1, "Q8_0": cpu_ir.Q8_0}
CODE_BYTES = {"Q4_0": 16, "Q4_1": 16, "Q8_0": 32}
BLOCK = 32
QUANTISED_AT_ONCE = 1 << 21  # weights
_slabs = Slabs()


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """weight [rows, columns] = scalar [1] * blocks; `panels` uint8 [rows / 8, blocks of a row, bytes]; `format` a key
    of FORMATS.

    `name` is what people see. `columns` that are no multiple of 32, and `rows` that are none of 8, are padded with 0.
    """

    panels: Bytes
    format: str
    rows: int
    columns: int
    name: str
    scalar: np.ndarray[Any, np.dtype[np.float32]] = field(default_factory=lambda: np.ones(1, np.float32))

    def record(self, bias: int = 0) -> Words:
        """The matrix as kernels take it; `bias` is the address of its float32 bias."""
        _, blocks, size = self.panels.shape
        address, kind = self.panels.ctypes.data, FORMATS[self.format]
        words = (address, kind, blocks * size, blocks, self.rows, bias, self.scalar.ctypes.data)
        return np.array((*words, dots.address, tile_product_address()), np.int64)

    def file_rows(self, rows: Words) -> Bytes:
        """Rows as GGUF has them, uint8 [n, bytes of a row]: what `to_panels` was given."""
        code_bytes, own = CODE_BYTES[self.format], rows % PANEL
        panels = self.panels[rows // PANEL]
        scales = panels.shape[2] // PANEL - code_bytes
        parts = []
        for part, size in ((panels[:, :, : PANEL * scales], 2), (panels[:, :, PANEL * scales :], 4)):
            turns = part.reshape(len(rows), part.shape[1], -1, PANEL, size)
            parts.append(turns[np.arange(len(rows)), :, :, own].reshape(len(rows), part.shape[1], -1))
        return np.concatenate(parts, 2).reshape(len(rows), -1)


def to_panels(data: Bytes, kind: str) -> Bytes:
    """GGUF rows uint8 [rows, bytes of a row] -> panels, [rows / 8, blocks, 8 * bytes of a block].

    Of each eight rows, scales come first, then minima, then four bytes of codes of each row in turn: a byte of
    nibbles holds columns j and j + 16 in a file, which is four steps of four columns further on in a panel.
    """
    code_bytes = CODE_BYTES[kind]
    size = code_bytes + (4 if kind == "Q4_1" else 2)
    data = np.pad(data, ((0, -len(data) % PANEL), (0, 0))) if len(data) % PANEL else data
    eights = data.reshape(-1, PANEL, data.shape[1] // size, size)
    panels = _slabs.take(len(eights), eights.shape[2], PANEL * size)
    scales = (size - code_bytes) // 2
    for i in range(scales):
        panels[:, :, 16 * i : 16 * i + 16] = _in_turn(eights[..., 2 * i : 2 * i + 2], 2)
    panels[:, :, 16 * scales :] = _in_turn(eights[..., size - code_bytes :], 4)
    return panels


def _in_turn(parts: Bytes, size: int) -> Bytes:
    """[panels, 8, blocks, n * size] -> [panels, blocks, n * 8 * size]: `size` bytes of each row in turn."""
    panels, rows, blocks, _ = parts.shape
    return parts.reshape(panels, rows, blocks, -1, size).transpose(0, 2, 3, 1, 4).reshape(panels, blocks, -1)


def from_file(data: Bytes, kind: str, columns: int) -> BlockMatrix:
    """Rows of GGUF blocks; `data` is copied."""
    return BlockMatrix(to_panels(data, kind), kind, data.shape[0], columns, f"{kind.lower()} (file)")


def quantise(weight: Tensor) -> BlockMatrix:
    """weight [rows, columns] of any float type as int8, a scale per 32; one factor keeps scales in float16's range."""
    rows, columns = weight.shape
    width = rec.padded(columns)
    data = np.empty((rows, width // BLOCK, 2 + BLOCK), np.uint8)
    largest = float(weight.abs().amax()) / 127
    factor = 2.0 ** math.floor(math.log2(largest)) if math.isfinite(largest) and largest > 0 else 1.0
    step = max(1, QUANTISED_AT_ONCE // width)
    for first in range(0, rows, step):
        part = F.pad(weight[first : first + step].float() / factor, (0, width - columns))
        part = part.view(-1, width // BLOCK, BLOCK)
        scales = (part.abs().amax(-1, keepdim=True) / 127).half()
        codes = (part / scales.float()).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
        target = data[first : first + step]
        target[:, :, :2] = scales.numpy().view(np.uint8)
        target[:, :, 2:] = codes.numpy().view(np.uint8)
    panels = to_panels(data.reshape(rows, -1), "Q8_0")
    return BlockMatrix(panels, "Q8_0", rows, columns, "int8", np.array([factor], np.float32))


class BlockLinear:
    """One product for matrices stacked along their outputs. x float32 [T, in] -> float32 [T, out].

    x is rounded to int8 with a scale per 32 (`panel_ir`).
    """

    def __init__(self, parts: Sequence[BlockMatrix], bias: Tensor | None) -> None:
        self.parts = tuple(parts)
        self.rows = sum(part.rows for part in parts)
        self.columns = parts[0].columns
        self.bias = torch.zeros(self.rows) if bias is None else bias.float().contiguous()
        self.nbytes = sum(part.panels.nbytes for part in parts)

    @property
    def formats(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of each part."""
        return tuple((part.name, part.panels.nbytes) for part in self.parts)

    def records(self) -> list[Words]:
        """The parts as kernels take them, each with its own piece of the bias."""
        starts = np.cumsum([0, *(part.rows for part in self.parts)])
        return [part.record(self.bias.data_ptr() + 4 * int(at)) for part, at in zip(self.parts, starts, strict=False)]

    def __call__(self, x: Tensor) -> Tensor:
        outs = [_product(part, x, record) for part, record in zip(self.parts, self.records(), strict=True)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _product(matrix: BlockMatrix, x: Tensor, record: Words) -> Tensor:
    tokens, x = x.shape[0], x.contiguous()
    out = torch.empty(tokens, matrix.rows)
    rows = np.empty((rec.tiled(tokens), rec.row_bytes(matrix.columns)), np.uint8)
    room = matrix.panels.shape[1] * SPREAD_BYTES // 4
    scratch = np.empty((team().size, rec.tiled(tokens) * PANEL + BLOCK + room), np.float32)
    job = np.zeros(rec.JOB_WORDS, np.int64)
    job[:] = (
        record.ctypes.data,
        x.data_ptr(),
        tokens,
        matrix.columns,
        rows.ctypes.data,
        out.data_ptr(),
        FUNCTIONS.ctypes.data,
        scratch.ctypes.data,
        scratch.strides[0],
    )
    if tokens:
        team().run(project, 2, (job.ctypes.data, 0, 0), (job, record, matrix, x, rows, out, scratch))
    return out
