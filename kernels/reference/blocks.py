"""Copies of whole blocks in plain torch, with the signature of their kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_blocks_out(
    pairs: Tensor,
    blocks_per_extent: int,
    data_extents: Sequence[Tensor],
    scale_extents: Sequence[Tensor],
    extent_table: Tensor,
) -> None:
    """Copy block `pairs[i, 0]` to block `pairs[i, 1]` in all layers, data and scales; the table is not read."""
    for source, target in pairs.tolist():
        a, b = divmod(source, blocks_per_extent), divmod(target, blocks_per_extent)
        for extents in (data_extents, scale_extents):
            if extents:
                extents[b[0]][b[1]].copy_(extents[a[0]][a[1]])
