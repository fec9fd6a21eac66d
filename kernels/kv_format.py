"""How K and V are kept in the cache: a format is data that one store kernel and one decode kernel read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes that an extent's addresses are multiples of: what 128-bit loads need."""
INT4_GROUP = 32
"""Channels of a head that share one scale and one minimum in int4."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`dtype` is what the data tensor holds. Blocks lie in an extent's data tensor

        [blocks, num_layers, 2 (K, V), block_size, num_kv_heads, data_width(head_dim)]

    and, where the format has scales, in its scale tensor of dtype `scale_dtype`

        [blocks, num_layers, scale_planes, block_size, num_kv_heads, scale_width(head_dim)].

    int8: round(x / s) in -127..127, one s = max(|K|, |V|) / 127 per token, layer and KV head for both K and V (one
    plane). int4: two channels per byte, channel 2 i in the low nibble; round((x - minimum) / s) in 0..15 with the s and
    the minimum of each group of `INT4_GROUP` channels, planes for K and V; all s of a head, then all minima. fp8: e4m3,
    saturating at 448, no scales. Rounding is half to even and happens once, on write; an all-zero row gives zeros.
    """

    name: str
    dtype: torch.dtype
    bits: int
    scale_planes: int = 0
    scale_dtype: torch.dtype = torch.float32

    @property
    def has_scales(self) -> bool:
        return self.scale_planes > 0

    def data_width(self, head_dim: int) -> int:
        """Elements of `dtype` that one head of one token takes."""
        return head_dim // 2 if self.bits == 4 else head_dim

    def scale_width(self, head_dim: int) -> int:
        """Elements of `scale_dtype` of one head of one token in each plane."""
        if not self.has_scales:
            return 0
        return 2 * -(-head_dim // INT4_GROUP) if self.bits == 4 else 1

    def bytes_per_head(self, head_dim: int) -> int:
        """Bytes of K and V together, scales included, of one KV head of one token in one layer."""
        data = 2 * self.data_width(head_dim) * self.dtype.itemsize
        return data + self.scale_planes * self.scale_width(head_dim) * self.scale_dtype.itemsize


FP32 = KVFormat("fp32", torch.float32, 32)
BF16 = KVFormat("bf16", torch.bfloat16, 16)
FP16 = KVFormat("fp16", torch.float16, 16)
INT8 = KVFormat("int8", torch.int8, 8, scale_planes=1)
FP8 = KVFormat("fp8", torch.float8_e4m3fn, 8)
INT4 = KVFormat("int4", torch.uint8, 4, scale_planes=2, scale_dtype=torch.float16)

KV_FORMATS = {fmt.name: fmt for fmt in (FP32, BF16, FP16, INT8, FP8, INT4)}


def fill_extent_table(table: Tensor, data_extents: Sequence[Tensor], scale_extents: Sequence[Tensor]) -> None:
    """Write the extents' addresses into `table`, int64 [max_extents, 2], from its first row on.

    `scale_extents` is empty for formats without scales. ValueError if the table is too short or an address not aligned.
    """
    if table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != 2 or len(data_extents) > table.shape[0]:
        raise ValueError(f"the extent table must be int64 [{len(data_extents)} or more, 2], not {tuple(table.shape)}")
    scales = [extent.data_ptr() for extent in scale_extents] or [0] * len(data_extents)
    rows = [[extent.data_ptr(), scale] for extent, scale in zip(data_extents, scales, strict=True)]
    if any(address % ALIGNMENT for row in rows for address in row):
        raise ValueError(f"an extent's address is not a multiple of {ALIGNMENT} bytes")
    table[: len(rows)].copy_(torch.tensor(rows, dtype=torch.int64).view(-1, 2))
