"""Norm, RoPE and the write of K and V: kernel and reference against formulas in float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu import store_kv as store
from kernels.gpu import tiles
from kernels.kv_format import KV_FORMATS, fill_extent_table
from kernels.reference import paged
from tests.support import interpreter_fp8
from tests.support.interpreter import is_interpreting
from tests.support.paged_cache import (
    DEVICE,
    PagedCache,
    can_run,
    checked_integers,
    encode,
    frequencies,
    random,
    rotate,
    tensors_where_kernels_run,
)

LAYER, EPS, ROPE_SCALE = 1, 1e-6, 1.25
POSITIONS = torch.tensor([0, 1, 77, 131071, 5, 6], device=DEVICE)
# Blocks of three extents of four, offsets 0 to 7; a row that is not stored, and one that lands in the null block.
SLOTS = torch.tensor([2 * 8, 11 * 8 + 7, 5 * 8 + 3, 7 * 8, -1, 4], device=DEVICE)


@pytest.fixture(autouse=True)
def on_the_device():
    yield from tensors_where_kernels_run()


@pytest.fixture(autouse=True)
def nearest_fp8(monkeypatch):
    if is_interpreting():
        interpreter_fp8.round_to_nearest(monkeypatch)


def _balance(kv_heads, head_dim):
    return torch.tensor([2.0, 0.3, 1.5, 7.0])[:kv_heads, None] * (1 + torch.arange(head_dim) % 5)


class Step:
    """One step's q, k and v, and what must come of them."""

    def __init__(self, head_dim, heads, kv_heads, dtype, norm, balanced, rotate_keys=True):
        self.heads, self.kv_heads, self.head_dim, self.rotate_keys = heads, kv_heads, head_dim, rotate_keys
        self.qkv = random(len(SLOTS), (heads + 2 * kv_heads) * head_dim).to(dtype)
        # Groups that zero is not part of: what pads a head to a power of two must not count.
        self.qkv[:, -kv_heads * head_dim :] += 3
        self.norms = [random(head_dim, seed=7 + i) for i in range(2)] if norm else [None, None]
        self.balance = _balance(kv_heads, head_dim) if balanced else None

    def run(self, op, cache, qkv=None, **launch):
        q_out = torch.full((len(SLOTS), self.heads, self.head_dim), float("nan"), dtype=self.qkv.dtype)
        kv_format, layer, *where = cache.where(LAYER)
        op(
            self.qkv if qkv is None else qkv, POSITIONS, SLOTS, frequencies(self.head_dim), ROPE_SCALE, *self.norms,
            EPS, self.balance, not self.rotate_keys, kv_format, layer, *where, q_out, **launch,
        )  # fmt: skip
        return q_out

    def exact(self, positions=POSITIONS):
        """float64 q, k, v as they leave for `q_out` and the cache."""
        q, k, v = (
            self.qkv.double().view(len(SLOTS), -1, self.head_dim).split((self.heads, self.kv_heads, self.kv_heads), 1)
        )
        if self.norms[0] is not None:
            q, k = (
                x / (x.pow(2).mean(-1, True) + EPS).sqrt() * w.double() for x, w in zip((q, k), self.norms, strict=True)
            )
        q = rotate(q, positions, frequencies(self.head_dim), ROPE_SCALE)
        if self.rotate_keys:
            k = rotate(k, POSITIONS, frequencies(self.head_dim), ROPE_SCALE)
        if self.balance is not None:
            group = self.heads // self.kv_heads
            q = torch.stack([q[:, h] * self.balance[h // group].double() for h in range(self.heads)], 1)
            k = k / self.balance.double()
        return q, k, v


def codes(extent):
    """Integers that stand in the order of the values, one apart for neighbours; packed int4 as two per byte."""
    if extent.dtype == torch.uint8:
        return torch.stack((extent & 15, extent >> 4)).int()
    if extent.dtype == torch.float8_e4m3fn:
        bits = extent.view(torch.int8).int()
        return torch.where(bits < 0, -(bits & 127), bits)
    return extent.nan_to_num(12345.0) if extent.is_floating_point() else extent.int()


def assert_same_cache(got, wanted):
    """Every slot, written or not: quantised codes at most one apart and rarely so, other values as near as rounding."""
    for a, b in zip(got.data + got.scales, wanted.data + wanted.scales, strict=True):
        a, b = codes(a), codes(b)
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=2e-3 if a.dtype == torch.float16 else 2e-5, atol=1e-5)
        else:
            difference = (a - b).abs()
            assert difference.max() <= 1
            assert difference.float().mean() < 1e-3


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "heads", "kv_heads", "dtype", "norm", "balanced", "rotate_keys"),
    [
        ("fp32", 64, 3, 1, torch.float32, False, False, True),
        ("fp32", 80, 4, 2, torch.float32, True, True, True),
        ("fp16", 96, 7, 1, torch.float16, True, False, True),
        ("fp16", 128, 4, 4, torch.float16, False, True, False),
        ("fp16", 256, 3, 3, torch.float32, True, True, True),
        ("int8", 64, 6, 2, torch.float32, False, True, True),
        ("int8", 80, 7, 1, torch.float16, True, False, False),
        ("int8", 256, 4, 1, torch.float32, True, True, True),
        ("int4", 64, 3, 1, torch.float32, True, True, True),
        ("int4", 80, 4, 2, torch.float32, False, False, True),
        ("int4", 96, 7, 1, torch.float16, True, False, False),
        ("int4", 128, 1, 1, torch.float32, False, True, True),
        ("int4", 16, 2, 2, torch.float32, False, False, True),
        ("fp8", 64, 4, 1, torch.float32, True, False, True),
        ("fp8", 96, 3, 3, torch.float32, False, True, False),
    ],
)
def test_formats_head_sizes_and_groups(kv_format, head_dim, heads, kv_heads, dtype, norm, balanced, rotate_keys):
    if not can_run(kv_format):
        pytest.skip("no fp8 on this card")
    step = Step(head_dim, heads, kv_heads, dtype, norm, balanced, rotate_keys)
    exact_q, exact_k, exact_v = step.exact()
    by_formula = PagedCache(kv_format, head_dim, kv_heads)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            encode(kv_format, exact_k[token], exact_v[token], *by_formula.slot(LAYER, slot // 8, slot % 8))
    for op, launch in ((paged.store_kv, {}), (store.launch_store_kv, {"params": {"HEADS": 4}})):
        cache = PagedCache(kv_format, head_dim, kv_heads)
        q = step.run(op, cache, **launch)
        # Once rounded to q's dtype; in float32 the angle's own sine and cosine are off by some 1e-7.
        torch.testing.assert_close(q.double(), exact_q, rtol=6e-4 if dtype == torch.float16 else 1e-5, atol=1e-5)
        assert_same_cache(cache, by_formula)


@pytest.mark.parametrize(("norm", "balanced"), [(False, False), (True, True)])
def test_queries_for_sinks_are_turned_no_further_than_asked(norm, balanced):
    step, largest = Step(64, 6, 2, torch.float32, norm, balanced), 50
    for op, launch in ((paged.store_kv, {}), (store.launch_store_kv, {"params": {"HEADS": 4}})):
        sink_q = torch.full((len(SLOTS), 6, 64), float("nan"))
        q = step.run(op, PagedCache("fp16", 64, 2), sink_position=largest, sink_q_out=sink_q, **launch)
        torch.testing.assert_close(q.double(), step.exact()[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sink_q.double(), step.exact(POSITIONS.clamp(max=largest))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp16"])
def test_rows_of_zeros_and_of_one_value(kv_format):
    """No division by a scale of zero, and a group of equal values comes back as that value."""
    step = Step(64, 2, 2, torch.float32, False, False, rotate_keys=False)
    step.qkv.zero_()
    step.qkv.view(len(SLOTS), 6, 64)[:, 4] = 0.75
    cache = PagedCache(kv_format, 64, 2)
    step.run(store.launch_store_kv, cache)
    for slot in (16, 95):
        table = torch.full((slot // 8 + 1,), slot // 8, dtype=torch.int32)
        keys, values = paged.read_tokens(*cache_arguments(cache), table, slot + 1)
        assert not keys[slot].any()
        assert not values[slot, 1].any()
        torch.testing.assert_close(values[slot, 0], torch.full((64,), 0.75), rtol=1e-3, atol=0)


def cache_arguments(cache):
    return cache.kv_format, cache.data, cache.scales, cache.blocks_per_extent, LAYER


@pytest.mark.skipif(not can_run("fp8"), reason="no fp8 on this card")
def test_fp8_saturates():
    step = Step(64, 1, 1, torch.float32, False, False)
    step.qkv *= 1000
    cache = PagedCache("fp8", 64, 1)
    step.run(store.launch_store_kv, cache)
    assert cache.slot(LAYER, 2, 0)[0].float().abs().max() == 448


def test_qkv_may_be_part_of_wider_rows():
    step, caches = Step(64, 3, 1, torch.float16, False, False), [PagedCache("fp16", 64, 1) for _ in range(2)]
    wide = torch.cat((step.qkv, torch.full_like(step.qkv[:, :64], float("nan"))), 1)
    narrow = step.run(store.launch_store_kv, caches[0])
    assert torch.equal(narrow, step.run(store.launch_store_kv, caches[1], wide[:, : step.qkv.shape[1]]))
    assert_same_cache(*caches)


def test_offsets_past_two_to_the_31():
    cache = PagedCache.vast("int8", 256)
    slots = torch.tensor([cache.blocks_per_extent * 64 - 1])
    qkv, q_out = random(1, 3 * 256), torch.empty(1, 1, 256)
    kv_format, _, *where = cache.where(31)
    with checked_integers():
        store.launch_store_kv(
            qkv,
            torch.tensor([3]),
            slots,
            frequencies(256),
            1.0,
            None,
            None,
            EPS,
            None,
            True,
            kv_format,
            31,
            *where,
            q_out,
        )
    data, scales = cache.slot(31, cache.blocks_per_extent - 1, 63)
    k, v, scale = paged.quantise_int8(qkv[:, 256:512], qkv[:, 512:])
    assert torch.equal(data[0], k)
    assert torch.equal(data[1], v)
    assert torch.equal(scales[0], scale)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96])
def test_quantised_values_are_near(head_dim):
    """Half a step at most: a step is a 127th of a row's largest value, a 15th of a group's range."""
    x, y = 5 * random(7, head_dim), random(7, head_dim, seed=1)
    k, v, scale = paged.quantise_int8(x, y)
    for codes_, values in ((k, x), (v, y)):
        assert ((paged.dequantise_int8(codes_, scale) - values).abs() <= scale * 0.50001).all()
    packed, scales = paged.quantise_int4(x)
    assert packed.shape[-1] == KV_FORMATS["int4"].data_width(head_dim)
    assert scales.shape[-1] == KV_FORMATS["int4"].scale_width(head_dim)
    step = scales.float()[:, : scales.shape[-1] // 2].repeat_interleave(32, -1)[:, :head_dim]
    # The minimum and the step are fp16 themselves.
    assert ((paged.dequantise_int4(packed, scales) - x).abs() <= step * 0.5 + 2e-2).all()
    assert ((paged.quantise_fp8(x).float() - x).abs() <= x.abs() / 16 + 1e-3).all()


@triton.jit
def _sincos_kernel(angles, sin, cos, N: tl.constexpr):
    at = tl.arange(0, N)
    s, c = tiles.sincos(tl.load(angles + at))
    tl.store(sin + at, s)
    tl.store(cos + at, c)


@pytest.mark.parametrize(("largest", "error"), [(1.0, 2e-7), (1e3, 2e-7), (131072.0, 3e-7), (2.0**20, 1e-6)])
def test_sine_and_cosine_of_large_angles(largest, error):
    angles = torch.cat(
        (torch.linspace(0, largest, 2040), torch.tensor([1e-30, 1e-4, *(3.1415927 * n / 4 for n in range(1, 7))]))
    )
    sin, cos = torch.empty_like(angles), torch.empty_like(angles)
    _sincos_kernel[(1,)](angles, sin, cos, N=2048)
    assert (sin - angles.double().sin()).abs().max() < error
    assert (cos - angles.double().cos()).abs().max() < error


def test_the_registered_op_writes_through_lists_of_extents():
    step, caches = Step(64, 2, 2, torch.float32, False, False), [PagedCache("int8", 64, 2) for _ in range(2)]
    step.run(torch.ops.kvscope.store_kv, caches[0])
    step.run(paged.store_kv, caches[1])
    assert_same_cache(*caches)


def test_what_does_not_fit_is_said():
    step = Step(64, 3, 1, torch.float32, False, False)
    with pytest.raises(ValueError, match="does not hold q, k and v"):
        step.run(store.launch_store_kv, PagedCache("fp32", 64, 2))
    with pytest.raises(ValueError, match="another shape or dtype"):
        step.run(store.launch_store_kv, PagedCache("fp32", 80, 1))
    table = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="extent table"):
        fill_extent_table(table, [step.qkv, step.qkv], [])
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        fill_extent_table(table, [step.qkv.view(-1)[1:]], [])
