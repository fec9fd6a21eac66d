"""Shape and size of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_cache.window import Windows
from kernels.kv_format import KVFormat
from kernels.layer_groups import LayerGroup as LayerGroup
from kernels.layer_groups import LayerPlace as LayerPlace
from kernels.layer_groups import default_places


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What a block holds: K and V of `num_layers` stores for `num_kv_heads` heads, kept as `format` says.

    `places` has one entry for each layer of the model that attends: the group whose block tables it uses and its store
    in their blocks. Layers at one place share K and V. The defaults are one group that sees all positions, with a store
    for each layer.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    format: KVFormat
    groups: tuple[LayerGroup, ...] = (LayerGroup(),)
    places: tuple[LayerPlace, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a place outside groups and stores."""
        if not self.places:
            object.__setattr__(self, "places", default_places(self.num_layers))
        if not all(0 <= p.group < len(self.groups) and 0 <= p.store < self.num_layers for p in self.places):
            raise ValueError("a layer's place must name one of the groups and one of the stores")

    @property
    def kv_format(self) -> str:
        """Its name in `KV_FORMATS`."""
        return self.format.name

    @property
    def windows(self) -> Windows:
        """Which blocks each group needs; no groups where nothing attends."""
        return Windows(self.groups if self.num_layers else (), self.block_size)

    @property
    def group_bytes_per_token(self) -> int:
        """In one group, with the scales where the format has them."""
        return self.num_layers * self.num_kv_heads * self.format.bytes_per_head(self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """What a token takes in all groups, as long as those with a window hold it."""
        return len(self.groups) * self.group_bytes_per_token

    @property
    def block_bytes(self) -> int:
        return self.group_bytes_per_token * self.block_size

    @property
    def block_shape(self) -> tuple[int, ...]:
        """[num_layers, 2 (K, V), block_size, num_kv_heads, data width]"""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.format.data_width(self.head_dim))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """[num_layers, planes, block_size, num_kv_heads, scale width]; no planes where the format has no scales."""
        planes, width = self.format.scale_planes, self.format.scale_width(self.head_dim)
        return (self.num_layers, planes, self.block_size, self.num_kv_heads, width)
