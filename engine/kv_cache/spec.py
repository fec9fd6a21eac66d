"""Shape and size of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.kv_format import KVFormat


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one token costs: K and V of every layer for `num_kv_heads` heads, kept as `format` says."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    format: KVFormat

    @property
    def kv_format(self) -> str:
        """Its name in `KV_FORMATS`."""
        return self.format.name

    @property
    def bytes_per_token(self) -> int:
        """With the scales, where the format has them."""
        return self.num_layers * self.num_kv_heads * self.format.bytes_per_head(self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def block_shape(self) -> tuple[int, ...]:
        """[num_layers, 2 (K, V), block_size, num_kv_heads, data width]"""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.format.data_width(self.head_dim))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """[num_layers, planes, block_size, num_kv_heads, scale width]; no planes where the format has no scales."""
        planes, width = self.format.scale_planes, self.format.scale_width(self.head_dim)
        return (self.num_layers, planes, self.block_size, self.num_kv_heads, width)
