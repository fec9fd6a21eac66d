"""Shape and size of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.kv_format import KV_FORMATS


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one token costs: K and V of every layer for `num_kv_heads` heads, in float32, bfloat16 or float16."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def kv_format(self) -> str:
        """Its name in `KV_FORMATS`."""
        return next(fmt.name for fmt in KV_FORMATS.values() if fmt.dtype is self.dtype and not fmt.has_scales)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def block_shape(self) -> tuple[int, ...]:
        """[num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]"""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)
