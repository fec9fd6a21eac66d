"""Index tensors for single tokens and whole blocks of the paged cache, the same for every store of a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one extent, the same for every store: `index[store]` int64, and the rows of the batch, or of what is
    gathered, that they belong to; None: all in turn."""

    rows: Tensor
    index: tuple[Tensor, ...]
    other_rows: Tensor | None


def _layer_indices(base: Tensor, step: int, num_layers: int) -> tuple[Tensor, ...]:
    offsets = torch.arange(0, step * num_layers, step, device=base.device)
    return (base + offsets[:, None]).unbind(0)


def as_rows(extent: Tensor, width: int) -> Tensor:
    """[rows, width]; numbers of one byte as uint8, because torch does not index all of them."""
    return (extent.view(torch.uint8) if extent.itemsize == 1 else extent).view(-1, width)


def token_rows(slots: Tensor, extents: Sequence[Tensor], per_extent: int, by_kind: bool = False) -> tuple[Rows, ...]:
    """Rows [blocks * layers * kinds * block_size, KV * width] of each slot, its kinds (K, V or scales) in a row, or
    with `by_kind` first one kind of all."""
    if not extents:
        return ()
    _, num_layers, kinds, block_size, num_kv_heads, width = extents[0].shape
    blocks = slots // block_size
    owner = blocks // per_extent
    used = owner.unique().tolist() if len(extents) > 1 else [0]
    found = []
    for extent in used:
        chosen = (owner == extent).nonzero().view(-1) if len(used) > 1 else None
        local, own_slots = (blocks, slots) if chosen is None else (blocks[chosen], slots[chosen])
        local = local - extent * per_extent
        base = local * (kinds * num_layers * block_size) + own_slots % block_size
        each = torch.stack([base + kind * block_size for kind in range(kinds)], dim=0 if by_kind else -1).view(-1)
        if by_kind and chosen is not None:
            chosen = torch.cat([chosen + kind * len(slots) for kind in range(kinds)])
        rows = as_rows(extents[extent], num_kv_heads * width)
        found.append(Rows(rows, _layer_indices(each, kinds * block_size, num_layers), chosen))
    return tuple(found)


def block_gathers(
    blocks: list[int], extents: Sequence[Tensor], per_extent: int, gathered: Tensor
) -> tuple[tuple[Rows, Tensor], ...]:
    """One gather for all kinds together where all blocks lie in one extent, else one per kind and run of blocks in an
    extent."""
    _, num_layers, kinds, *block = extents[0].shape
    width, device = math.prod(block), gathered.device
    place = as_rows(gathered, width).view(kinds, len(blocks), width)
    gathers: list[tuple[Rows, Tensor]] = []

    def add(extent: int, ids: list[int], which: Sequence[int], out: Tensor) -> None:
        base = torch.tensor(ids, device=device) % per_extent * (kinds * num_layers)
        index = torch.cat([base + kind for kind in which])
        rows = as_rows(extents[extent], width)
        gathers.append((Rows(rows, _layer_indices(index, kinds, num_layers), None), out))

    homes = [block_id // per_extent for block_id in blocks]
    if len(set(homes)) == 1:
        add(homes[0], blocks, range(kinds), place.view(-1, width))
        return tuple(gathers)
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or homes[end] != homes[start]:
            for kind in range(kinds):
                add(homes[start], blocks[start:end], (kind,), place[kind, start:end])
            start = end
    return tuple(gathers)
