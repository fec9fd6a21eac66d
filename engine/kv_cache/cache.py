"""The tensors of the KV cache: blocks with all their layers, in extents that come and go without moving a block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.spec import KVCacheSpec
from engine.memory.huge_pages import ask_for_huge_pages
from kernels.dispatch import operations, triton_runs_on
from kernels.kv_format import fill_extent_table
from kernels.layer_groups import LayerGroup, LayerPlace
from kernels.reference.kv_codes import decode

EXTENT_BYTES = 8 * 2**20
"""Of 16 or more bits a value. Small beside a few sessions' caches, since the last extent is half empty on average."""
BlockTables = Sequence[Sequence[int]]


def usual_extent_bytes(spec: KVCacheSpec) -> int:
    """`EXTENT_BYTES`, less for fewer bits, so that the last extent is no larger a part of the whole."""
    return EXTENT_BYTES * min(spec.format.bits, 16) // 16


def fitting_extent_bytes(spec: KVCacheSpec, context_tokens: int) -> int:
    """About the usual size, so that a whole number of extents is one full context: what is planned is allocated."""
    blocks = spec.windows.blocks(context_tokens, 1) + 1
    wanted = max(usual_extent_bytes(spec) // max(spec.block_bytes, 1), 1)
    if 2 * blocks <= 3 * wanted:
        return blocks * spec.block_bytes
    sizes = range(max(wanted - wanted // 4, 1), wanted + wanted // 4 + 1)
    return min(sizes, key=lambda size: (-blocks % size, abs(size - wanted))) * spec.block_bytes


class KVCache:
    """Block `b` is `extents[b // blocks_per_extent][b % blocks_per_extent]`; block 0 only pads block tables.

    Each extent is [blocks, num_layers, 2 (K, V), block_size, num_kv_heads, data width], and where the format has scales
    there is an extent of these beside it (`kernels.kv_format`). Fresh blocks hold arbitrary values: nothing is read
    before it is written. Which block belongs to whom is the block pool's business. The last extent ends at
    `max_blocks`, because a budget that is exceeded is none.

    `balance`, float32 [num_layers, num_kv_heads, head_dim], divides the keys that are stored and multiplies the queries
    that read them; None is 1. It is fixed before the first token.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        device: torch.device,
        extent_bytes: int = EXTENT_BYTES,
        max_blocks: int | None = None,
    ) -> None:
        self.spec = spec
        self.device = device
        self.max_blocks = max_blocks
        self.balance: Tensor | None = None
        self.blocks_per_extent = max(1, extent_bytes // max(spec.block_bytes, 1))
        self.extents: list[Tensor] = []
        self.scale_extents: list[Tensor] = []
        # As long as the cache may ever need it: a captured CUDA graph holds its address, only its content changes.
        count = 1 if max_blocks is None else -(-max_blocks // self.blocks_per_extent)
        self.extent_table = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self._operations = operations(device, triton_runs_on(device))
        self._workspace: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def kv_format(self) -> str:
        return self.spec.kv_format

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return self.spec.groups

    @property
    def places(self) -> tuple[LayerPlace, ...]:
        return self.spec.places

    @property
    def capacity_blocks(self) -> int:
        """Block ids below this have memory; the null block counts."""
        return sum(extent.shape[0] for extent in self.extents)

    @property
    def reserved_bytes(self) -> int:
        return self.capacity_blocks * self.spec.block_bytes

    @property
    def workspace_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._workspace.values())

    def grow(self, blocks: int) -> None:
        """Make block ids below `blocks` usable, at most `max_blocks`. Blocks that exist stay where they are."""
        first = len(self.extents)
        while self.capacity_blocks < blocks:
            room = self.blocks_per_extent
            if self.max_blocks is not None:
                room = min(room, self.max_blocks - self.capacity_blocks)
            fmt = self.spec.format
            shape = (room, *self.spec.block_shape)
            self.extents.append(torch.empty(shape, dtype=fmt.dtype, device=self.device))
            ask_for_huge_pages(self.extents[-1])
            if fmt.has_scales:
                shape = (room, *self.spec.scale_shape)
                self.scale_extents.append(torch.empty(shape, dtype=fmt.scale_dtype, device=self.device))
            if len(self.extents) > len(self.extent_table):
                self.extent_table = torch.cat((self.extent_table, torch.zeros_like(self.extent_table)))
        if len(self.extents) > first:
            fill_extent_table(self.extent_table[first:], self.extents[first:], self.scale_extents[first:])

    def shrink(self, blocks: int) -> None:
        """Give back the extents that hold only block ids from `blocks` on, and the scratch memory."""
        kept = -(-blocks // self.blocks_per_extent)
        del self.extents[kept:], self.scale_extents[kept:]
        self._workspace.clear()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers, in order; pairs of (source, target) block ids."""
        where = (self.blocks_per_extent, self.extents, self.scale_extents, self.extent_table)
        for run in _apart(pairs):
            self._operations.copy_blocks(torch.tensor(run, device=self.device), *where)

    def export_blocks(self, block_ids: Sequence[int]) -> dict[str, Tensor]:
        """Host copies of whole blocks, all layers, in order: "data" [n, *block_shape] and, where the format has them,
        "scales" [n, ...], in the cache's own types. Page-locked where the cache is on a card. `n` is at least 1."""
        pinned = self.device.type == "cuda"
        tensors = {}
        for name, extents in self._stores().items():
            shape = (len(block_ids), *extents[0].shape[1:])
            out = torch.empty(shape, dtype=extents[0].dtype, pin_memory=pinned)
            for row, block_id in enumerate(block_ids):
                out[row].copy_(self._block(extents, block_id), non_blocking=True)
            tensors[name] = out
        if pinned:
            torch.cuda.current_stream(self.device).synchronize()
        return tensors

    def import_blocks(
        self, block_ids: Sequence[int], tensors: Mapping[str, Tensor], rows: Sequence[int] | None = None
    ) -> None:
        """Put what `export_blocks` gave into the blocks `block_ids`, row by row, or only its `rows`, in their order.

        Raises ValueError, before anything is written, where names, shapes or types are not those of this cache.
        """
        stores = self._stores()
        count = len(block_ids) if rows is None else max((len(tensor) for tensor in tensors.values()), default=0)
        if block_ids and {name: _kind(extents[0], count) for name, extents in stores.items()} != {
            name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }:
            raise ValueError("the tensors are not blocks of this cache")
        taken = range(count) if rows is None else rows
        if len(taken) != len(block_ids) or any(not 0 <= row < count for row in taken):
            raise ValueError("there is not one row for each block")
        runs = list(_runs(block_ids, taken, self.blocks_per_extent))
        for name, extents in stores.items():
            for block_id, row, many in runs:
                extent, first = divmod(block_id, self.blocks_per_extent)
                extents[extent][first : first + many].copy_(tensors[name][row : row + many], non_blocking=True)

    def _stores(self) -> dict[str, list[Tensor]]:
        return {name: part for name, part in (("data", self.extents), ("scales", self.scale_extents)) if part}

    def _block(self, extents: list[Tensor], block_id: int) -> Tensor:
        extent, row = divmod(block_id, self.blocks_per_extent)
        return extents[extent][row]

    def read(self, tables: BlockTables, layer: int, head: int, tensor: str, start: int, count: int) -> Tensor:
        """float32 [count, head_dim] on the host: "k" or "v" of one KV head at `start : start + count` of a sequence."""
        return self.read_tokens(tables, start, count, layer)[0 if tensor == "k" else 1, 0, :, head].cpu()

    def read_tokens(self, tables: BlockTables, start: int, count: int, layer: int | None = None) -> Tensor:
        """float32 [2 (K, V), layers, count, num_kv_heads, head_dim] of one layer that attends or all.

        `tables`: a block table for each group of layers. As attention reads them, keys with the balance constant taken
        out again. NaN where a group does not hold a position's block.
        """
        places = self.spec.places if layer is None else self.spec.places[layer : layer + 1]
        if not count or not places:
            return torch.empty(2, len(places), 0, self.spec.num_kv_heads, self.spec.head_dim)
        stores = slice(None) if layer is None else slice(places[0].store, places[0].store + 1)
        groups = {g: self._read_group(tables[g], stores, start, count) for g in {place.group for place in places}}
        found = [groups[place.group][:, place.store if layer is None else 0] for place in places]
        values = torch.stack(found, 1)
        if self.balance is not None:
            values[0] *= (self.balance if layer is None else self.balance[layer : layer + 1])[:, None]
        return values

    def _read_group(self, table: Sequence[int], stores: slice, start: int, count: int) -> Tensor:
        """[2 (K, V), stores, count, num_kv_heads, head_dim]"""
        size = self.spec.block_size
        held = [(table[position // size], position % size) for position in range(start, start + count)]

        def rows(extents: list[Tensor]) -> Tensor:
            """[2 or scale planes, stores, count, num_kv_heads, width]"""
            found = [self._block(extents, block_id)[stores, :, offset] for block_id, offset in held]
            return torch.stack(found, 1).movedim(2, 0)

        values = decode(self.spec.format, rows(self.extents), rows(self.scale_extents) if self.scale_extents else None)
        absent = [index for index, (block_id, _) in enumerate(held) if block_id == NULL_BLOCK]
        values[:, :, absent] = math.nan
        return values

    def workspace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A scratch tensor that is kept and reused, growing by halves; its values are undefined."""
        size = math.prod(shape)
        kept = self._workspace.get((name, dtype))
        if kept is None or kept.numel() < size:
            kept = torch.empty(size + size // 2, dtype=dtype, device=self.device)
            self._workspace[name, dtype] = kept
        return kept[:size].view(shape)


def _kind(extent: Tensor, count: int) -> tuple[tuple[int, ...], torch.dtype]:
    return (count, *extent.shape[1:]), extent.dtype


def _runs(block_ids: Sequence[int], rows: Sequence[int], per_extent: int) -> Iterator[tuple[int, int, int]]:
    """`(block id, row, count)`: neighbours in one extent that are neighbours among the rows too."""
    first = 0
    for end in range(1, len(block_ids) + 1):
        distance = end - first
        if end < len(block_ids) and (
            (block_ids[end], rows[end]) == (block_ids[first] + distance, rows[first] + distance)
            and block_ids[end] % per_extent
        ):
            continue
        yield block_ids[first], rows[first], distance
        first = end


def _apart(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Pairs in runs that may be copied at once: no target is in another pair of its run."""
    run: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if source in written or target in read | written:
            yield run
            run, read, written = [], set(), set()
        run.append((source, target))
        read.add(source)
        written.add(target)
    if run:
        yield run
