"""Whole blocks are copied, data and scales, within an extent and between extents; nothing else is touched."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from kernels.gpu.copy_blocks import copy_blocks, launch_copy_blocks
from kernels.kv_format import KV_FORMATS, KVFormat, fill_extent_table
from tests.support import interpreter

DEVICE = "cpu" if interpreter.is_interpreting() else "cuda"
BLOCKS, LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 3, 2, 3, 1, 32


def _pool(fmt: KVFormat) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Two extents of random bytes."""
    generator = torch.Generator().manual_seed(1)

    def extents(planes: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
        shape = (BLOCKS, LAYERS, planes, BLOCK_SIZE, KV_HEADS, width * dtype.itemsize)
        raw = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(2)]
        return [part.to(DEVICE).view(dtype) for part in raw]

    data = extents(2, fmt.data_width(HEAD_DIM), fmt.dtype)
    scales = extents(fmt.scale_planes, fmt.scale_width(HEAD_DIM), fmt.scale_dtype) if fmt.has_scales else []
    table = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
    fill_extent_table(table, data, scales)
    return data, scales, table


def _bytes(extents: list[torch.Tensor]) -> list[list[int]]:
    return [extent.contiguous().view(torch.uint8).flatten().tolist() for extent in extents]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_arrive_and_the_others_stay(name: str, dtype: torch.dtype) -> None:
    data, scales, table = _pool(KV_FORMATS[name])
    before = [[extent.clone() for extent in extents] for extents in (data, scales)]
    pairs = torch.tensor([(1, 5), (4, 2), (0, 0), (0, 0)], dtype=dtype, device=DEVICE)
    copy_blocks(pairs, BLOCKS, data, scales, table)
    for extents, old in zip((data, scales), before, strict=True):
        if old:
            old[1][2] = old[0][1]
            old[0][2] = old[1][1]
        assert _bytes(extents) == _bytes(old)


def test_reference_agrees() -> None:
    from kernels.reference.blocks import copy_blocks_out

    data, scales, table = _pool(KV_FORMATS["int4"])
    other_data, other_scales, _ = _pool(KV_FORMATS["int4"])
    pairs = torch.tensor([(1, 5), (4, 2)], device=DEVICE)
    copy_blocks(pairs, BLOCKS, data, scales, table)
    copy_blocks_out(pairs, BLOCKS, other_data, other_scales, table)
    assert _bytes(data) == _bytes(other_data)
    assert _bytes(scales) == _bytes(other_scales)


def test_offsets_past_32_bits() -> None:
    """Block ids of a huge extent, of which only two blocks exist: the table's address is as far before them."""
    first = 2**20
    data = [torch.randint(0, 256, (2, 1, 2, 16, 8, 64), dtype=torch.uint8, device=DEVICE)]
    size = data[0][0].numel()
    assert first * size // 4 > 2**31
    table = torch.tensor([[data[0].data_ptr() - first * size, 0]], device=DEVICE)
    checks = interpreter.overflow_checks() if interpreter.is_interpreting() else nullcontext()
    with checks:
        copy_blocks(torch.tensor([(first, first + 1)], device=DEVICE), 2**21, data, [], table)
    assert torch.equal(data[0][0], data[0][1])


def test_a_block_whose_size_is_odd() -> None:
    data = [torch.arange(3 * 5, dtype=torch.uint8, device=DEVICE).view(3, 1, 1, 1, 1, 5)]
    table = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    fill_extent_table(table, data, [])
    copy_blocks(torch.tensor([(0, 2)], device=DEVICE), 3, data, [], table)
    assert data[0].flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]


def test_other_shapes_are_refused() -> None:
    data, scales, table = _pool(KV_FORMATS["fp16"])
    with pytest.raises(ValueError, match="Block pairs"):
        launch_copy_blocks(torch.zeros(2, 3, dtype=torch.int64), BLOCKS, data, scales, table)
    with pytest.raises(ValueError, match="extent table"):
        launch_copy_blocks(torch.zeros(2, 2, dtype=torch.int64), BLOCKS, data, scales, table.int())
