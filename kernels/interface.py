"""What the kernels need to know of a batch and of the cache; the engine's own classes fit these shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.layer_groups import LayerGroup, LayerPlace


class BatchMetadata(Protocol):
    """S sequences with T tokens in all, tokens of a sequence adjacent, for a cache with G groups of layers.

    Tensors lie on the model's device."""

    @property
    def positions(self) -> Tensor:
        """int64 [T]: position of each token in its sequence."""
        ...

    @property
    def slot_mapping(self) -> Tensor:
        """int64 [G, T]: block_id * block_size + offset of the slot that takes the token's K and V, for each group."""
        ...

    @property
    def block_tables(self) -> Tensor:
        """int32 [G, S, blocks], the null block 0 where a group holds none; contiguous."""
        ...

    @property
    def context_lens(self) -> Tensor:
        """int32 [S]: tokens of each sequence in the cache once this step's are stored."""
        ...

    @property
    def cu_seqlens_q(self) -> Tensor:
        """int32 [S + 1]: prefix sums of the sequences' token counts."""
        ...

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Tokens of each sequence in this batch."""
        ...

    @property
    def context_lens_host(self) -> tuple[int, ...]:
        """Tokens of each sequence in the cache once this step's are stored."""
        ...


class PagedStore(Protocol):
    """Extents of blocks, each [blocks, num_layers, 2 (K, V), block_size, num_kv_heads, data width]."""

    @property
    def extents(self) -> Sequence[Tensor]:
        """Block `b` is `extents[b // blocks_per_extent][b % blocks_per_extent]`."""
        ...

    @property
    def blocks_per_extent(self) -> int: ...

    @property
    def kv_format(self) -> str:
        """A key of `kernels.kv_format.KV_FORMATS`."""
        ...

    @property
    def groups(self) -> Sequence[LayerGroup]:
        """Groups of layers, each with block tables of its own."""
        ...

    @property
    def places(self) -> Sequence[LayerPlace]:
        """Of each layer that attends; the first layer at a place stores K and V there."""
        ...

    @property
    def scale_extents(self) -> Sequence[Tensor]:
        """The scales of each extent's blocks, where the format has them."""
        ...

    @property
    def extent_table(self) -> Tensor:
        """int64 [extents at most, 2]: addresses of data and scales of each extent, for kernels."""
        ...

    @property
    def balance(self) -> Tensor | None:
        """float32 [layers that attend, num_kv_heads, head_dim]: divides stored keys and multiplies queries; None is 1.

        Layers at one place take the factors of the first of them."""
        ...

    def workspace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A scratch tensor that is kept and reused; its values are undefined."""
        ...
