"""A sequence's stored K and V, read and written by position: the one place here that knows how they lie in blocks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache.cache import KVCache
from engine.sequence import Sequence
from kernels.kv_format import KVFormat
from kernels.reference.kv_codes import decode, encode


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A host copy of the first `count` positions, as the cache keeps them. Nothing that is run later changes it.

    `tensors`: as `KVCache.export_blocks` gives them. `balance`: that of the cache, on the host.
    """

    format: KVFormat
    count: int
    tensors: dict[str, Tensor]
    balance: Tensor | None

    def layer(self, layer: int) -> Tensor:
        """float32 [2 (K, V), count, num_kv_heads, head_dim] as attention reads them, the balance taken out of K."""
        data, scales = self._rows("data", layer), self._rows("scales", layer) if self.format.has_scales else None
        values = decode(self.format, data, scales)
        if self.balance is not None:
            values[0] *= self.balance[layer]
        return values

    def requantised(self, layer: int, rows: Tensor) -> Tensor:
        """What the format makes of rows [2, n, num_kv_heads, head_dim] of this layer: the same shape, float32."""
        return _rounded(self.format, rows, None if self.balance is None else self.balance[layer])

    def _rows(self, name: str, layer: int) -> Tensor:
        """[2 or scale planes, count, num_kv_heads, width]"""
        blocks = self.tensors[name][:, layer].movedim(1, 0)
        return blocks.flatten(1, 2)[:, : self.count]


def read_rows(cache: KVCache, sequence: Sequence, count: int) -> StoredRows:
    """Copy the first `count` (at least 1) positions of a sequence. Pending block copies must have been carried out."""
    blocks = -(-count // cache.spec.block_size)
    balance = None if cache.balance is None else cache.balance.cpu()
    return StoredRows(cache.spec.format, count, cache.export_blocks(sequence.block_table[:blocks]), balance)


def put_rows(cache: KVCache, sequence: Sequence, rows: StoredRows) -> None:
    """Fill a sequence of another cache of the same shape and format with these rows; its blocks are reserved."""
    blocks = -(-rows.count // cache.spec.block_size)
    cache.import_blocks(sequence.block_table[:blocks], {name: part[:blocks] for name, part in rows.tensors.items()})


def write_rows(cache: KVCache, sequence: Sequence, layer: int, positions: SequenceOf[int], rows: Tensor) -> None:
    """Store float32 rows [2, len(positions), num_kv_heads, head_dim] in a sequence's own blocks, rounded as usual."""
    if cache.balance is not None:
        rows = torch.stack((rows[0] / cache.balance[layer].to(rows.device), rows[1]))
    data, scales = encode(cache.spec.format, rows)
    for index, position in enumerate(positions):
        block, offset = divmod(position, cache.spec.block_size)
        extent, row = divmod(sequence.block_table[block], cache.blocks_per_extent)
        cache.extents[extent][row, layer, :, offset].copy_(data[:, index])
        if scales is not None:
            cache.scale_extents[extent][row, layer, :, offset].copy_(scales[:, index])


def _rounded(fmt: KVFormat, rows: Tensor, balance: Tensor | None) -> Tensor:
    factors = torch.ones_like(rows)
    if balance is not None:
        factors[0] *= balance
    data, scales = encode(fmt, rows / factors)
    return decode(fmt, data, scales) * factors
