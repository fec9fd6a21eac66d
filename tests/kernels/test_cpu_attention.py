"""Attention of the compiled CPU kernels, tiles and splits, against torch's definition on the same cache."""

from types import SimpleNamespace

import pytest
import torch

from engine.kv_cache.cache import KVCache
from engine.kv_cache.spec import KVCacheSpec, LayerGroup, LayerPlace
from kernels import reference
from kernels.dispatch import cpu_kernels
from kernels.kv_format import KV_FORMATS
from kernels.reference.attention_plan import plan_attention
from tests.support.batches import make_metadata

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels can't be compiled here")

BLOCK = 16
TABLE = (torch.randperm(80, generator=torch.Generator().manual_seed(2)) + 1).tolist()
# Steps of one or several sequences: (tokens before, tokens now); 8 and more are tiles.
STEPS = {
    "first": [(0, 1)],
    "split end": [(127, 1)],
    "splits": [(128, 1), (300, 1), (15, 7)],
    "whole heads": [(1000, 1)],
    "fresh": [(0, 70)],
    "resumed": [(130, 33)],
    "mixed": [(0, 9), (511, 1), (64, 64), (200, 3)],
}


def setting(heads, kv_heads, dim, kv_format, group):
    """Layers of random weights, and a cache whose second store belongs to layer 1."""
    from kernels.cpu import blocks as cpu_blocks
    from kernels.cpu import step as cpu_step

    def matrix(rows, columns):
        return cpu_blocks.quantise(torch.randn(rows, columns))

    qkv = cpu_blocks.BlockLinear([matrix(heads * dim, 32), *(matrix(kv_heads * dim, 32) for _ in range(2))], None)
    o, down = (cpu_blocks.BlockLinear([matrix(32, width)], None) for width in (heads * dim, 64))
    gate_up = cpu_blocks.BlockLinear([matrix(64, 32), matrix(64, 32)], None)
    layer = cpu_step.LayerParts(qkv, o, gate_up, down, torch.ones(32), torch.ones(32), None, None)
    sizes = {"heads": heads, "kv_heads": kv_heads, "eps": 1e-5, "rope_scale": 1.0, "scale": dim**-0.5}
    layers = cpu_step.FusedLayers([layer] * 2, torch.ones(32), torch.ones(dim // 2), **sizes)
    places = (LayerPlace(0, 0), LayerPlace(0, 1))
    spec = KVCacheSpec(2, kv_heads, dim, BLOCK, KV_FORMATS[kv_format], (group,), places)
    cache = KVCache(spec, torch.device("cpu"), extent_bytes=7 * spec.block_bytes)
    cache.grow(90)
    for extent in (*cache.extents, *cache.scale_extents):
        extent.fill_(float("nan") if extent.is_floating_point() else 85)
    return layers, cache


def fill(cache, sequences, kv_heads, dim):
    """K and V of every position that exists; V has a length that shows when it is weighted twice."""
    for start, count, table in sequences:
        meta = make_metadata([(0, start + count, table)], BLOCK, cache=cache)
        plan = plan_attention(meta, cache, kv_heads, dim, torch.float32)
        reference.store_kv(plan, 1, torch.randn(start + count, 2 * kv_heads, dim) + 0.2)


def compiled(layers, cache, meta, q, sink_q):
    """The phases of attention alone, of layer 1, on one thread."""
    import numba
    import numpy as np

    from kernels.cpu import ir
    from kernels.cpu import records as rec
    from kernels.cpu.functions import FUNCTIONS
    from kernels.cpu.items import plan_items

    kv_heads = cache.spec.num_kv_heads
    items = plan_items(meta, cache, kv_heads, q.shape[1] // kv_heads)
    buffers = layers._take(len(q), items.split_tokens, items.splits, 1)
    step, _alive = layers._record(buffers, items, cache, meta)
    _, _, qkv, attended, own_sink_q, _, scratch = buffers.others
    qkv[: len(q), : q[0].numel()] = q.reshape(len(q), -1).numpy()
    own_sink_q[: len(q)] = sink_q.numpy()

    @numba.njit("void(int64, int64, int64, int64, int64)")
    def phases(attention, combined, sync, step, scratch):
        ir.call_5(attention, sync, 0, step, 1, scratch)
        ir.call_5(combined, sync, 1, step, 1, scratch)

    sync, work = np.zeros(64, np.int64), scratch.ctypes.data + 4 * int(step[rec.WORK])
    phases(FUNCTIONS[rec.ATTENTION], FUNCTIONS[rec.COMBINED_ROWS], sync.ctypes.data, step.ctypes.data, work)
    return torch.from_numpy(attended[: len(q)].reshape(len(q), -1).copy())


def check(steps, heads=6, kv_heads=2, dim=64, kv_format="fp32", window=None, sinks=0):
    torch.manual_seed(0)
    layers, cache = setting(heads, kv_heads, dim, kv_format, LayerGroup(window, sinks))
    tables, sequences = list(TABLE), []
    for start, count in steps:
        needed = -(-(start + count) // BLOCK)
        sequences.append((start, count, tables[:needed]))
        tables = tables[needed:]
    fill(cache, sequences, kv_heads, dim)
    meta = make_metadata(sequences, BLOCK, cache=cache)
    tokens = sum(count for _, count in steps)
    q, sink_q = torch.randn(tokens, heads, dim), torch.randn(tokens, heads, dim)
    plan = plan_attention(meta, cache, heads, dim, torch.float32)
    expected = reference.attention(plan, 1, q, dim**-0.5, sink_q if sinks else None)
    result = compiled(layers, cache, meta, q, sink_q)
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "bf16", "int8", "fp8", "int4"])
def test_formats(name, kv_format):
    check(STEPS[name], kv_format=kv_format)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 2), (7, 1), (5, 1), (64, 1)])
def test_query_heads_of_a_kv_head(heads, kv_heads):
    check(STEPS["mixed"], heads, kv_heads, dim=32)
    check(STEPS["whole heads"], heads, kv_heads, dim=32)


@pytest.mark.parametrize("dim", [8, 24, 80, 96, 128, 256])
def test_sizes_of_a_head(dim):
    check(STEPS["mixed"], dim=dim)


@pytest.mark.parametrize("name", ["splits", "whole heads", "fresh", "resumed", "mixed"])
@pytest.mark.parametrize("window", [16, 100])
def test_windows(name, window):
    """Blocks out of sight are not in the table: their place is the null block, full of NaN."""
    check(STEPS[name], window=window)


@pytest.mark.parametrize("kv_format", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["splits", "whole heads", "fresh", "mixed"])
def test_sinks_are_scored_by_queries_of_their_own(name, kv_format):
    check(STEPS[name], window=24, sinks=5, kv_format=kv_format)


def test_a_bad_key_or_value_shows_in_what_sees_it():
    torch.manual_seed(0)
    for plane in range(2):
        for start, count in ((40, 1), (40, 9)):
            layers, cache = setting(6, 2, 64, "fp16", LayerGroup())
            fill(cache, [(start, count, TABLE[:4])], 2, 64)
            cache.extents[TABLE[1] // cache.blocks_per_extent][
                TABLE[1] % cache.blocks_per_extent, 1, plane, 3, 0, 5
            ] = float("nan")
            meta = make_metadata([(start, count, TABLE[:4])], BLOCK, cache=cache)
            result = compiled(layers, cache, meta, torch.randn(count, 6, 64), torch.zeros(count, 6, 64))
            assert not result[:, : 3 * 64].isfinite().all(1).any() and result[:, 3 * 64 :].isfinite().all()


def test_items_cover_every_token_once():
    from kernels.cpu import items as cpu_items
    from kernels.cpu import records as rec

    meta = SimpleNamespace(query_lens=(1, 70, 7), context_lens_host=(900, 100, 7))
    store = SimpleNamespace(groups=(LayerGroup(), LayerGroup(100)))
    found = cpu_items.plan_items(meta, store, 2, 3)
    assert found.part_rows.tolist() == [0, *[-1] * 70, *range(1, 8)]
    for group in found.groups:
        tiles = group[group[:, rec.SPLIT_INDEX] < 0]
        tokens = [t for first, count, *_ in tiles.tolist() for t in range(first, first + count)]
        assert sorted(tokens) == sorted([*range(1, 71)] * 2), "once for each KV head"
    assert found.splits == 8 and len(found.groups[1]) < len(found.groups[0])
