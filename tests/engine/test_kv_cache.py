"""The cache's tensors: size, growth that moves nothing, copies, reading back."""

from dataclasses import replace

import pytest
import torch

from engine.kv_cache.cache import KVCache
from engine.kv_cache.spec import KVCacheSpec
from kernels.kv_format import KV_FORMATS
from tests.support.paged_cache import encode

CPU = torch.device("cpu")


def make_cache(kv_format="fp32", blocks_per_extent=3):
    spec = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, format=KV_FORMATS[kv_format])
    return KVCache(spec, CPU, extent_bytes=blocks_per_extent * spec.block_bytes)


@pytest.mark.parametrize(("kv_format", "size"), [("fp32", 4), ("fp16", 2), ("bf16", 2), ("fp8", 1)])
def test_size_of_a_token(kv_format, size):
    """The published figure: 16 layers, 8 KV heads of 64 in fp16 are 32 KiB a token."""
    spec = KVCacheSpec(num_layers=16, num_kv_heads=8, head_dim=64, block_size=16, format=KV_FORMATS[kv_format])
    assert spec.bytes_per_token == 2 * 16 * 8 * 64 * size
    assert spec.block_bytes == 16 * spec.bytes_per_token
    if size == 2:
        assert spec.bytes_per_token == 32 * 1024


def test_growth_keeps_blocks_where_they_are():
    cache = make_cache()
    assert (cache.capacity_blocks, cache.reserved_bytes) == (0, 0)
    cache.grow(2)
    assert cache.capacity_blocks == 3
    address = cache.extents[0].data_ptr()
    cache.extents[0].fill_(7)
    cache.grow(7)
    assert (cache.capacity_blocks, len(cache.extents)) == (9, 3)
    assert cache.extents[0].data_ptr() == address and bool((cache.extents[0] == 7).all())
    assert cache.reserved_bytes == sum(extent.nbytes for extent in cache.extents)
    cache.grow(1)
    assert cache.capacity_blocks == 9


@pytest.mark.parametrize(("blocks", "left"), [(9, 9), (7, 9), (6, 6), (1, 3), (0, 0)])
def test_shrink_gives_back_whole_extents_only(blocks, left):
    cache = make_cache()
    cache.grow(9)
    cache.shrink(blocks)
    assert cache.capacity_blocks == left


@pytest.mark.parametrize("kv_format", list(KV_FORMATS))
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_read_follows_the_block_table(kv_format, tensor):
    cache = make_cache(kv_format)
    cache.grow(9)
    cache.balance = torch.tensor([[1.0, 1.0], [4.0, 1.0]])[..., None].expand(2, 2, 4)
    table, expected = [8, 1, 5], []
    for position in range(10):
        extent, block = divmod(table[position // 4], 3)
        scales = cache.scale_extents[extent][block, 1, :, position % 4] if cache.scale_extents else None
        k, v = (torch.full((2, 4), float(position)) + torch.arange(4) + shift for shift in (0, 100))
        read = encode(kv_format, k, v, cache.extents[extent][block, 1, :, position % 4], scales)
        expected.append(read[0][0] * 4 if tensor == "k" else read[1][0])
    rows = cache.read([table], layer=1, head=0, tensor=tensor, start=2, count=8)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, torch.stack(expected[2:]).float())
    assert cache.read([table], 0, 0, "k", 0, 0).shape == (0, 4)


@pytest.mark.parametrize("kv_format", ["fp32", "int8", "int4"])
def test_copied_blocks_are_equal_in_all_layers(kv_format):
    """Scales go with their codes."""
    cache = make_cache(kv_format)
    cache.grow(9)
    for extents in (cache.extents, cache.scale_extents):
        for extent in extents:
            extent.copy_(torch.randn(extent.shape, generator=torch.Generator().manual_seed(0)) * 9)
    cache.copy_blocks([(1, 8)])
    for extents in (cache.extents, cache.scale_extents):
        assert not extents or torch.equal(extents[2][2], extents[0][1])
    assert len(cache.scale_extents) == (0 if kv_format == "fp32" else 3)
    cache.shrink(4)
    assert [len(extents) for extents in (cache.extents, cache.scale_extents)] == [2, len(cache.scale_extents)]


def test_copies_of_copies_are_not_made_at_once():
    """A kernel copies all pairs of a launch at the same time."""
    cache, runs = make_cache(), []
    cache.grow(9)
    for extent in cache.extents:
        extent.copy_(torch.randn(extent.shape))

    def at_once(pairs, blocks_per_extent, extents, scale_extents, extent_table):
        runs.append(pairs.tolist())
        read = [extents[a // blocks_per_extent][a % blocks_per_extent].clone() for a, _ in runs[-1]]
        for (_, b), block in zip(runs[-1], read, strict=True):
            extents[b // blocks_per_extent][b % blocks_per_extent] = block

    cache._operations = replace(cache._operations, copy_blocks=at_once)
    first, third = cache.extents[0][1].clone(), cache.extents[1][0].clone()
    cache.copy_blocks([(1, 8), (1, 7), (8, 4), (3, 1), (1, 1)])
    assert torch.equal(cache.extents[2][2], first) and torch.equal(cache.extents[1][1], first)
    assert torch.equal(cache.extents[0][1], third) and torch.equal(cache.extents[2][1], first)
    assert [len(run) for run in runs] == [2, 2, 1]


def test_workspace_is_reused_and_counted():
    cache = make_cache()
    first = cache.workspace("gathered", (4, 10), torch.float32)
    assert cache.workspace("gathered", (2, 10), torch.float32).data_ptr() == first.data_ptr()
    assert cache.workspace_bytes >= first.nbytes
    assert cache.workspace("gathered", (4, 10), torch.float16).dtype == torch.float16
    cache.shrink(0)
    assert cache.workspace_bytes == 0


@pytest.mark.parametrize("kv_format", list(KV_FORMATS))
def test_exported_blocks_come_back_bit_for_bit(kv_format):
    cache = make_cache(kv_format)
    cache.grow(9)
    stores = [extents for extents in (cache.extents, cache.scale_extents) if extents]
    assert len(stores) == 1 + KV_FORMATS[kv_format].has_scales
    generator = torch.Generator().manual_seed(0)
    for extent in (extent for extents in stores for extent in extents):
        extent.copy_(50 * torch.rand(extent.shape, generator=generator))
    before = [[extent.to(torch.float32, copy=True) for extent in extents] for extents in stores]
    tensors = cache.export_blocks([8, 1, 5])
    assert set(tensors) == ({"data", "scales"} if len(stores) == 2 else {"data"})
    assert tensors["data"].shape == (3, *cache.spec.block_shape)
    cache.extents[1].fill_(7)
    assert torch.equal(tensors["data"][2].float(), before[0][1][2]), "an export is a copy"
    cache.extents[1].copy_(before[0][1])
    cache.import_blocks([2, 4, 7], tensors)
    for ids, rows in (([2, 4], [0, 3]), ([2, 4], [0]), ([2], [-1])):
        with pytest.raises(ValueError, match="row"):
            cache.import_blocks(ids, tensors, rows)
    for extents, old in zip(stores, before, strict=True):
        for block in range(9):
            source = {2: 8, 4: 1, 7: 5}.get(block, block)
            assert torch.equal(extents[block // 3][block % 3].float(), old[source // 3][source % 3])


def test_blocks_of_another_cache_are_refused_before_anything_is_written():
    cache, other = make_cache(), make_cache("fp16")
    cache.grow(3)
    other.grow(3)
    cache.extents[0].fill_(7)
    good = cache.export_blocks([1, 2])
    wrong = [
        other.export_blocks([1, 2]),
        {"data": good["data"][:1]},
        {"data": good["data"][..., :2]},
        {},
        {**good, "scales": good["data"]},
    ]
    for tensors in wrong:
        with pytest.raises(ValueError, match="not blocks of this cache"):
            cache.import_blocks([1, 2], tensors)
    assert bool((cache.extents[0] == 7).all())
