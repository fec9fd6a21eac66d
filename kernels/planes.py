"""GGUF's quantised weights as planes that a kernel reads 128 bits at a time; not one bit is added or lost.

A GGUF row is a string of blocks of 18 to 210 bytes, which no wide load fits. Here a row is cut into units of 128 bits
of low code bits, four int32 words, and everything else goes to planes of its own:

    codes      int32 [rows, units, 4]         the low `bits` (8, 4 or 2) of each code
    high       uint8 / int16 [rows, units, 4] the 1 or 2 bits above them
    scales     float16 or int32 [rows, ...]   per 32 columns, or per 256 where there are sub-scales; int32 holds two
                                              float16, the scale in the low half and the minimum in the high one
    sub        the sub-scales of a unit       Q2_K int32, 4 x (4-bit scale, 4-bit minimum); Q3_K int16, low 4 bits of 4
                                              scales; Q4_K, Q5_K uint8, 6-bit scale and low 2 bits of the minimum;
                                              Q6_K int16, 2 x int8
    sub_high   uint8                          Q3_K [rows, units]: high 2 bits of 4 scales; Q4_K, Q5_K [rows, units / 2]:
                                              high 4 bits of the minima of two units

Codes are unsigned, and a weight is (code - offset) * scale + minimum. Word w of a unit holds columns 8 i + 2 w + b as
slots 2 i + b, slot s at bit `bits * s`: a thread that owns a unit reads its columns of x eight at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORDS = 4
"""int32 words of a unit."""
PLANES = 5
"""Of a quantised weight."""

_ROWS_AT_ONCE = 2**23  # columns times rows repacked in one go; bounds the scratch memory of a load


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a GGUF block is laid out (ggml-common.h), and what its planes need to know.

    `low` and `high` are (byte offset in the block, bytes between neighbouring bits of one byte's columns); `scale_at`
    and `sub_at` are byte offsets. `sub_bits` is the width of a sub-scale, 0 where there is none.
    """

    kind: str
    columns: int
    nbytes: int
    bits: int
    offset: int
    low: tuple[int, int]
    scale_at: int
    has_min: bool = False
    high_bits: int = 0
    high: tuple[int, int] = (0, 0)
    sub_bits: int = 0
    sub_at: int = 0
    group: int = 32

    @property
    def slots(self) -> int:
        """Codes in an int32 word."""
        return 32 // self.bits

    @property
    def unit(self) -> int:
        """Columns of a unit."""
        return WORDS * self.slots


FORMATS = {
    fmt.kind: fmt
    for fmt in (
        BlockFormat("Q8_0", 32, 34, 8, 128, low=(2, 32), scale_at=0),
        BlockFormat("Q4_0", 32, 18, 4, 8, low=(2, 16), scale_at=0),
        BlockFormat("Q4_1", 32, 20, 4, 0, low=(4, 16), scale_at=0, has_min=True),
        BlockFormat("Q5_0", 32, 22, 4, 16, low=(6, 16), scale_at=0, high_bits=1, high=(2, 1)),
        BlockFormat("Q5_1", 32, 24, 4, 0, low=(8, 16), scale_at=0, has_min=True, high_bits=1, high=(4, 1)),
        BlockFormat("Q2_K", 256, 84, 2, 0, low=(16, 32), scale_at=80, has_min=True, sub_bits=4, sub_at=0, group=16),
        BlockFormat(
            "Q3_K",
            256,
            110,
            2,
            4,
            low=(32, 32),
            scale_at=108,
            high_bits=1,
            high=(0, 32),
            sub_bits=6,
            sub_at=96,
            group=16,
        ),
        BlockFormat("Q4_K", 256, 144, 4, 0, low=(16, 32), scale_at=0, has_min=True, sub_bits=6, sub_at=4),
        BlockFormat(
            "Q5_K",
            256,
            176,
            4,
            0,
            low=(48, 32),
            scale_at=0,
            has_min=True,
            high_bits=1,
            high=(16, 32),
            sub_bits=6,
            sub_at=4,
        ),
        BlockFormat(
            "Q6_K",
            256,
            210,
            4,
            32,
            low=(0, 64),
            scale_at=208,
            high_bits=2,
            high=(128, 32),
            sub_bits=8,
            sub_at=192,
            group=16,
        ),
    )
}

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds that are not quantised: one plane [rows, columns] of this dtype."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [rows, columns] of one kind: its planes codes, high, scales, sub, sub_high, empty where it has none."""

    kind: str
    rows: int
    columns: int
    planes: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def to(self, device: torch.device | str) -> PackedWeight:
        return PackedWeight(self.kind, self.rows, self.columns, tuple(plane.to(device) for plane in self.planes))


def pack(blocks: Tensor | np.ndarray[Any, np.dtype[np.uint8]], kind: str, columns: int) -> PackedWeight:
    """GGUF blocks uint8 [rows, bytes of a row] -> planes on the same device. In `PLAIN` kinds blocks are the weights.

    Raises ValueError for a kind that is not known and for rows that are not whole blocks of `columns` columns.
    """
    raw = torch.from_numpy(np.ascontiguousarray(blocks)) if isinstance(blocks, np.ndarray) else blocks.contiguous()
    if kind in PLAIN:
        return plain(raw.view(PLAIN[kind]).view(raw.shape[0], columns))
    fmt = FORMATS.get(kind)
    if fmt is None:
        raise ValueError(f"Weights of GGUF type {kind} can't be repacked.")
    if columns % fmt.columns or raw.shape[1] != columns // fmt.columns * fmt.nbytes:
        raise ValueError(f"Rows of {raw.shape[1]} bytes aren't {columns} columns in blocks of {kind}.")
    rows = raw.view(raw.shape[0], -1, fmt.nbytes).split(max(1, _ROWS_AT_ONCE // columns))
    parts = [_pack_rows(part, fmt) for part in rows]
    return PackedWeight(kind, raw.shape[0], columns, tuple(torch.cat(planes) for planes in zip(*parts, strict=True)))


def plain(weight: Tensor) -> PackedWeight:
    """A weight [rows, columns] that is not quantised, float32, float16 or bfloat16, kept as it is."""
    for kind, dtype in PLAIN.items():
        if weight.dtype == dtype:
            return PackedWeight(kind, weight.shape[0], weight.shape[1], (weight.contiguous(),))
    raise ValueError(f"A weight of {weight.dtype} has no kind.")


def stack(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One weight with the rows of all, for products of the same x. Raises ValueError where kind or columns differ."""
    first = weights[0]
    if any((w.kind, w.columns) != (first.kind, first.columns) for w in weights):
        raise ValueError("Only weights of the same kind and the same number of columns can be stacked.")
    planes = tuple(torch.cat(parts) for parts in zip(*(w.planes for w in weights), strict=True))
    return PackedWeight(first.kind, sum(w.rows for w in weights), first.columns, planes)


def dequantise(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight as [rows, columns], computed in float32 and rounded once to `dtype`."""
    if weight.kind in PLAIN:
        return weight.planes[0].to(dtype)
    fmt = FORMATS[weight.kind]
    codes, high, *rest = weight.planes
    values = _unpack_fields(codes.view(torch.uint8), fmt.bits)
    if fmt.high_bits:
        bits = _unpack_fields(high.view(torch.uint8), fmt.high_bits).unflatten(-1, (WORDS, fmt.slots))
        order = torch.tensor(high_order(fmt), device=bits.device)
        values = values | bits[..., order.argsort()].flatten(-2) << fmt.bits
    groups = _from_slots(values, fmt).view(weight.rows, -1, fmt.group).float() - fmt.offset
    scale, minimum = _group_scales(rest[0], rest[1], rest[2], fmt)
    result = groups.mul_(scale[..., None])
    if minimum is not None:
        result += minimum[..., None]
    return result.view(weight.rows, weight.columns).to(dtype)


def high_order(fmt: BlockFormat) -> list[int]:
    """Slots of a word in the order in which their high bits lie in the word of `high`.

    A kernel moves the high bits of several codes above their low bits with one shift, so codes that lie `bits` apart in
    each half of the low word have their high bits `bits` apart as well.
    """
    return sorted(range(fmt.slots), key=lambda slot: high_position(slot, fmt.bits, fmt.high_bits))


def high_position(slot: int, bits: int, high_bits: int) -> int:
    """The bit of a `high` word at which a slot's high bits begin."""
    half, j = divmod(slot, 16 // bits)
    run = 32 // bits * high_bits // bits
    return bits * (j % run) + high_bits * (half * (16 // bits // run) + j // run)


def _pack_rows(blocks: Tensor, fmt: BlockFormat) -> tuple[Tensor, ...]:
    """uint8 [rows, blocks, bytes of a block] -> the five planes."""
    rows, empty = blocks.shape[0], blocks.new_empty(0)
    low = _to_slots(_columns(blocks, fmt.low, fmt.bits, fmt.columns), fmt)
    if fmt.bits == 8:
        low = low ^ 128  # int8 to unsigned
    codes = _pack_fields(low, fmt.bits).view(torch.int32).view(rows, -1, WORDS)
    high = empty
    if fmt.high_bits:
        bits = _to_slots(_columns(blocks, fmt.high, fmt.high_bits, fmt.columns), fmt)
        high = _pack_fields(bits[..., high_order(fmt)], fmt.high_bits)
        high = high.view(rows, -1, WORDS) if high.shape[-1] == 1 else high.view(torch.int16).view(rows, -1, WORDS)
    scales = blocks[..., fmt.scale_at : fmt.scale_at + (4 if fmt.has_min else 2)].contiguous()
    scales = scales.view(torch.int32 if fmt.has_min else torch.float16).view(rows, -1)
    return codes, high, scales, *_sub_scales(blocks, fmt, empty)


def _sub_scales(blocks: Tensor, fmt: BlockFormat, empty: Tensor) -> tuple[Tensor, Tensor]:
    rows = blocks.shape[0]
    if not fmt.sub_bits:
        return empty, empty
    if fmt.sub_bits != 6:
        raw = blocks[..., fmt.sub_at : fmt.sub_at + 16].contiguous()
        return raw.view(torch.int32 if fmt.sub_bits == 4 else torch.int16).view(rows, -1), empty
    raw = blocks[..., fmt.sub_at : fmt.sub_at + 12]
    if not fmt.has_min:
        low = torch.cat((raw[..., :8] & 15, raw[..., :8] >> 4), -1)
        high = torch.cat([raw[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
        return _pack_fields(low, 4).view(torch.int16).view(rows, -1), _pack_fields(high, 2).view(rows, -1)
    first, second, third = raw.split(4, -1)
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minimum = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return (scale | minimum << 6).view(rows, -1), _pack_fields(minimum >> 2, 4).view(rows, -1)


def _group_scales(scales: Tensor, sub: Tensor, sub_high: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor | None]:
    """float32 [rows, groups]: scale and, where the kind has one, minimum."""
    rows = scales.shape[0]
    halves = scales.view(torch.float16).view(rows, -1, 2 if fmt.has_min else 1).float()
    scale, minimum = halves[..., 0], halves[..., 1] if fmt.has_min else None
    if not fmt.sub_bits:
        return scale, minimum
    scale = scale.repeat_interleave(256 // fmt.group, -1)
    raw = sub.view(torch.uint8)
    if fmt.sub_bits == 8:
        return scale * raw.view(torch.int8), None
    if minimum is None:
        six = _unpack_fields(raw.view(rows, -1, 2), 4) | _unpack_fields(sub_high.view(rows, -1, 1), 2) << 4
        return scale * (six.view(rows, -1).float() - 32), None
    if fmt.sub_bits == 4:
        return scale * (raw & 15), -minimum.repeat_interleave(16, -1) * (raw >> 4)
    six = raw >> 6 | _unpack_fields(sub_high, 4) << 2
    return scale * (raw & 63), -minimum.repeat_interleave(8, -1) * six


def _columns(blocks: Tensor, place: tuple[int, int], bits: int, columns: int) -> Tensor:
    """Codes uint8 [rows, blocks, columns] in the order of the columns, whose bits lie `width` bytes apart in GGUF."""
    start, width = place
    raw = blocks[..., start : start + columns * bits // 8].unflatten(-1, (-1, width))
    fields = [raw >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(fields, -2).flatten(-3)


def _to_slots(values: Tensor, fmt: BlockFormat) -> Tensor:
    """[rows, blocks, columns] -> [rows, units, WORDS, slots]."""
    units = values.reshape(values.shape[0], -1, fmt.slots // 2, WORDS, 2)
    return units.permute(0, 1, 3, 2, 4).flatten(-2)


def _from_slots(values: Tensor, fmt: BlockFormat) -> Tensor:
    units = values.view(values.shape[0], -1, WORDS, fmt.slots // 2, 2)
    return units.permute(0, 1, 3, 2, 4).flatten(1)


def _pack_fields(values: Tensor, bits: int) -> Tensor:
    """uint8 [..., n], each below 2^bits -> uint8 [..., n * bits / 8], the first in the lowest bits."""
    fields = values.unflatten(-1, (-1, 8 // bits))
    result = fields[..., 0]
    for i in range(1, 8 // bits):
        result = result | fields[..., i] << bits * i
    return result.contiguous()


def _unpack_fields(packed: Tensor, bits: int) -> Tensor:
    """The reverse: uint8 [..., m] -> uint8 [..., m * 8 / bits]."""
    return torch.stack([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).flatten(-2)
