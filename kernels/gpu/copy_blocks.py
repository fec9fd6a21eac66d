"""Copies of whole cache blocks, all layers at once, data and scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tuning import capability, launch_params
from kernels.kv_format import ALIGNMENT
from kernels.reference.blocks import copy_blocks_out
from kernels.registry import register


@triton.jit
def _block_words(
    block, extent_table_ptr, blocks_per_extent, block_words,
    COLUMN: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Pointer to a block's words of type WORD."""
    extent = block // blocks_per_extent
    address = tl.load(extent_table_ptr + extent * 2 + COLUMN)
    words = tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGN)
    return words + (block - extent * blocks_per_extent) * block_words


@triton.jit
def copy_blocks_kernel(
    pairs_ptr, extent_table_ptr, blocks_per_extent, block_words,
    COLUMN: tl.constexpr, BYTES: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (pair, part of the block): BLOCK words, int32 or single bytes."""
    pair = tl.program_id(0)
    source, target = tl.load(pairs_ptr + 2 * pair).to(tl.int64), tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < block_words
    WORD: tl.constexpr = tl.int8 if BYTES else tl.int32
    read = _block_words(source, extent_table_ptr, blocks_per_extent, block_words, COLUMN, WORD, ALIGN)
    write = _block_words(target, extent_table_ptr, blocks_per_extent, block_words, COLUMN, WORD, ALIGN)
    tl.store(write + at, tl.load(read + at, mask=inside, other=0), mask=inside)


def launch_copy_blocks(
    pairs: Tensor,
    blocks_per_extent: int,
    data_extents: Sequence[Tensor],
    scale_extents: Sequence[Tensor],
    extent_table: Tensor,
) -> None:
    """pairs int32 or int64 [n, 2] of (source, target) block ids; a block that is a target is in no other pair.

    A pair of a block with itself, such as (0, 0), may stand often: it fills up a batch of fixed size. Of the lists only
    shape and dtype of the first extent count; addresses come from `extent_table`, see `kernels.gpu.tiles`. Raises
    ValueError for other shapes and dtypes.
    """
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"Block pairs are int32 or int64 [n, 2], not {pairs.dtype} {tuple(pairs.shape)}.")
    if extent_table.dtype != torch.int64 or extent_table.dim() != 2 or extent_table.shape[1] != 2:
        raise ValueError(f"The extent table is int64 [extents, 2], not {tuple(extent_table.shape)}.")
    if not pairs.is_contiguous() or not extent_table.is_contiguous():
        raise ValueError("Block pairs and the extent table must be contiguous.")
    if not pairs.shape[0]:
        return
    params = launch_params("copy_blocks", capability())
    for column, extents in enumerate((data_extents, scale_extents)):
        if extents:
            size = extents[0][0].numel() * extents[0].dtype.itemsize
            single = size % 4 != 0
            words = size if single else size // 4
            copy_blocks_kernel[(pairs.shape[0], triton.cdiv(words, params["BLOCK"]))](
                pairs, extent_table, blocks_per_extent, words, COLUMN=column, BYTES=single, ALIGN=ALIGNMENT, **params
            )


copy_blocks = register(
    "copy_blocks",
    "(Tensor pairs, int blocks_per_extent, Tensor(a!)[] data_extents, Tensor(b!)[] scale_extents, Tensor extent_table)"
    " -> ()",
    launch_copy_blocks,
    copy_blocks_out,
)
