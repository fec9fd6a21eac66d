"""A sequence's stored K and V, read and written by position: the one place here that knows how they lie in blocks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.cache import KVCache
from engine.kv_cache.spec import KVCacheSpec
from engine.sequence import Sequence
from kernels.kv_format import KVFormat
from kernels.layer_groups import owners
from kernels.reference.kv_codes import decode, encode


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A host copy of the first `count` positions, as the cache keeps them. Nothing that is run later changes it.

    `tensors` and `held`: for each group of layers what `KVCache.export_blocks` gives, and which of the blocks the
    sequence has; the others, which a window has passed, mean nothing. `balance`: that of the cache, on the host.
    """

    spec: KVCacheSpec
    count: int
    tensors: tuple[dict[str, Tensor], ...]
    held: tuple[tuple[bool, ...], ...]
    balance: Tensor | None

    @property
    def layers(self) -> int:
        """Those of the model that attend."""
        return len(self.spec.places)

    def layer(self, layer: int) -> Tensor:
        """float32 [2 (K, V), count, num_kv_heads, head_dim] as attention reads them, the balance taken out of K."""
        fmt = self.spec.format
        data, scales = self._rows("data", layer), self._rows("scales", layer) if fmt.has_scales else None
        values = decode(fmt, data, scales)
        balance = _balance(self.spec, self.balance, layer)
        if balance is not None:
            values[0] *= balance
        return values

    def requantised(self, layer: int, rows: Tensor) -> Tensor:
        """What the format makes of rows [2, n, num_kv_heads, head_dim] of this layer: the same shape, float32."""
        return _rounded(self.spec.format, rows, _balance(self.spec, self.balance, layer))

    def first(self, count: int) -> StoredRows:
        """The first `count` positions."""
        return replace(self, count=count)

    def filled(self, other: StoredRows) -> StoredRows:
        """With the other's rows in place of those that windows have passed; the other has all."""
        tensors = []
        for own, more, held in zip(self.tensors, other.tensors, self.held, strict=True):
            lacking = torch.tensor([not one for one in held])
            filled = {name: part.clone() for name, part in own.items()} if bool(lacking.any()) else own
            if filled is not own:
                for name, part in filled.items():
                    part[lacking] = more[name][: len(part)][lacking]
            tensors.append(filled)
        return replace(self, tensors=tuple(tensors), held=tuple((True,) * len(held) for held in self.held))

    def positions_held(self) -> Tensor:
        """bool [count]: those that some group of layers has."""
        blocks = torch.tensor([any(group) for group in zip(*self.held, strict=True)])
        return blocks.repeat_interleave(self.spec.block_size)[: self.count]

    def _rows(self, name: str, layer: int) -> Tensor:
        """[2 or scale planes, count, num_kv_heads, width]"""
        place = self.spec.places[layer]
        blocks = self.tensors[place.group][name][:, place.store].movedim(1, 0)
        return blocks.flatten(1, 2)[:, : self.count]


def read_rows(cache: KVCache, sequence: Sequence, count: int) -> StoredRows:
    """Copy the first `count` (at least 1) positions of a sequence. Pending block copies must have been carried out."""
    blocks = -(-count // cache.spec.block_size)
    balance = None if cache.balance is None else cache.balance.cpu()
    tables = [table[:blocks] for table in sequence.block_tables]
    held = tuple(tuple(block_id != NULL_BLOCK for block_id in table) for table in tables)
    return StoredRows(cache.spec, count, tuple(cache.export_blocks(table) for table in tables), held, balance)


def put_rows(cache: KVCache, sequence: Sequence, rows: StoredRows) -> None:
    """Fill a sequence of another cache of the same shape and format with these rows; its blocks are reserved."""
    blocks = -(-rows.count // cache.spec.block_size)
    for table, tensors in zip(sequence.block_tables, rows.tensors, strict=True):
        cache.import_blocks(table[:blocks], {name: part[:blocks] for name, part in tensors.items()})


def write_rows(cache: KVCache, sequence: Sequence, layer: int, positions: SequenceOf[int], rows: Tensor) -> None:
    """Store float32 rows [2, len(positions), num_kv_heads, head_dim] in a sequence's own blocks, rounded as usual."""
    place, balance = cache.spec.places[layer], _balance(cache.spec, cache.balance, layer)
    if balance is not None:
        rows = torch.stack((rows[0] / balance.to(rows.device), rows[1]))
    data, scales = encode(cache.spec.format, rows)
    for index, position in enumerate(positions):
        block, offset = divmod(position, cache.spec.block_size)
        extent, row = divmod(sequence.block_tables[place.group][block], cache.blocks_per_extent)
        cache.extents[extent][row, place.store, :, offset].copy_(data[:, index])
        if scales is not None:
            cache.scale_extents[extent][row, place.store, :, offset].copy_(scales[:, index])


def is_held(cache: KVCache, sequence: Sequence, layer: int, position: int) -> bool:
    """Whether a layer's rows of a cached position are still there."""
    return sequence.blocks.holds(cache.spec.places[layer].group, position // cache.spec.block_size)


def _balance(spec: KVCacheSpec, balance: Tensor | None, layer: int) -> Tensor | None:
    """Layers at one place have the constants of the first of them, which stores."""
    return None if balance is None else balance[owners(spec.places)[layer]]


def _rounded(fmt: KVFormat, rows: Tensor, balance: Tensor | None) -> Tensor:
    factors = torch.ones_like(rows)
    if balance is not None:
        factors[0] *= balance
    data, scales = encode(fmt, rows / factors)
    return decode(fmt, data, scales) * factors
