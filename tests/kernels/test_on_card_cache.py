"""The paged cache's kernels with the head layouts of real models and 32K of context; tiny where there is no card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu.copy_blocks import copy_blocks
from kernels.gpu.paged_attention import split_count
from kernels.gpu.paged_decode import paged_decode, workspace_shapes
from kernels.gpu.paged_prefill import paged_prefill
from kernels.gpu.store_kv import store_kv
from kernels.kv_format import KV_FORMATS
from kernels.reference import paged
from kernels.reference.blocks import copy_blocks_out
from tests.support import interpreter_fp8
from tests.support.interpreter import is_interpreting
from tests.support.large_cache import LLAMA_1B, LLAMA_8B, QWEN_7B, SMOL, Heads, LargeCache, causal
from tests.support.paged_cache import can_run
from tests.support.sizes import DEVICE, ON_CARD, assert_as_good, dtypes, normal, sized

FORMATS = ("plain", "int8", "fp8", "int4")
TINY = Heads(3, 1, 64)
REAL = {"llama-8b": LLAMA_8B, "qwen-7b": QWEN_7B, "smollm2": SMOL, "llama-1b": LLAMA_1B}


@pytest.fixture(autouse=True)
def nearest_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_interpreting():
        interpreter_fp8.round_to_nearest(monkeypatch)


def kv_format(name: str, dtype: torch.dtype) -> str:
    """A format by name; "plain" is that of `dtype`."""
    if not can_run(name):
        pytest.skip("no fp8 on this card")
    return name if name != "plain" else next(f.name for f in KV_FORMATS.values() if f.dtype is dtype)


def with_heads(tiny: tuple[int, ...], real: tuple[int, ...]) -> list[Any]:
    return sized((TINY, tiny), {name: (heads, real) for name, heads in REAL.items()})


def decoded(cache: LargeCache, q: Tensor, splits: int) -> Tensor:
    heads = cache.heads
    shapes = workspace_shapes(len(q), heads.query, heads.size, splits)
    partials = [torch.full(shape, torch.nan, device=DEVICE) for shape in shapes]
    out = torch.full_like(q, torch.nan)
    scale = heads.size**-0.5
    paged_decode(q, cache.tables, cache.lens, scale, 0, 0, 0.0, None, 1.0, 0, *cache.where(), *partials, out)
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", with_heads((40, 1, 17), (32768, 1, 777, 8192)))
def test_decode(name: str, size: tuple[Heads, tuple[int, ...]]) -> None:
    heads, contexts = size
    for dtype in dtypes():
        cache = LargeCache(kv_format(name, dtype), heads, contexts)
        q = normal(len(contexts), heads.query, heads.size, dtype=dtype)
        out = decoded(cache, q, split_count(DEVICE, len(contexts) * heads.kv))
        for row, context in enumerate(contexts):
            asked = (q[row : row + 1], *cache.read(cache.tables[row], context), heads.size**-0.5)
            assert_as_good(out[row : row + 1], causal(*asked, dtype), causal(*asked, torch.float64))


@pytest.mark.parametrize("splits", [pytest.param(1, marks=ON_CARD), pytest.param(64, marks=ON_CARD)])
def test_any_number_of_splits_says_the_same(splits: int) -> None:
    cache = LargeCache(kv_format("plain", torch.float16), LLAMA_8B, (32768, 5))
    q = normal(2, 32, 128, dtype=torch.float16)
    torch.testing.assert_close(decoded(cache, q, splits), decoded(cache, q, 7), atol=1e-3, rtol=2e-3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", with_heads((5, 40, 3, 3), (200, 32768, 1000, 1000)))
def test_prefill(name: str, size: tuple[Heads, tuple[int, ...]]) -> None:
    """A chunk at the end of a long context, and a whole prompt."""
    heads, (chunk, context, prompt, whole) = size
    for dtype in dtypes():
        cache = LargeCache(kv_format(name, dtype), heads, (context, whole))
        q = normal(chunk + prompt, heads.query, heads.size, dtype=dtype)
        bounds = torch.tensor([0, chunk, chunk + prompt], dtype=torch.int32, device=DEVICE)
        out, scale = torch.full_like(q, torch.nan), heads.size**-0.5
        longest = max(chunk, prompt)
        paged_prefill(
            q, bounds, cache.tables, cache.lens, longest, scale, 0, 0, 0.0, None, 1.0, *cache.where(), out
        )  # fmt: skip
        for row, part in enumerate((slice(0, chunk), slice(chunk, None))):
            asked = (q[part], *cache.read(cache.tables[row], cache.contexts[row]), scale)
            assert_as_good(out[part], causal(*asked, dtype), causal(*asked, torch.float64))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", with_heads((18,), (600,)))
def test_store(name: str, size: tuple[Heads, tuple[int, ...]]) -> None:
    """q, and what the cache then holds, are as near to float64 as the definition's; nothing else is written."""
    heads, (tokens,) = size
    for dtype in dtypes():
        fmt = kv_format(name, dtype)
        qkv = normal(tokens, (heads.query + 2 * heads.kv) * heads.size, dtype=dtype)
        inv_freq = 5e5 ** -(torch.arange(heads.size // 2, device=DEVICE).float() / (heads.size // 2))
        positions = 32768 - tokens + torch.arange(tokens, device=DEVICE)
        found = []
        for op in (store_kv, paged.store_kv):
            cache, q = LargeCache(fmt, heads, room=tokens), torch.full(
                (tokens, heads.query, heads.size), torch.nan, dtype=dtype, device=DEVICE
            )  # fmt: skip
            table = cache.order[: -(-tokens // 16)]
            slots = (table[:, None] * 16 + torch.arange(16, device=DEVICE)).flatten()[:tokens].contiguous()
            op(qkv, positions, slots, inv_freq, 1.0, None, None, 1e-5, None, False, *cache.where(), q)
            found.append((q, *cache.read(table, tokens), cache))
        exact = exact_q_k_v(qkv, positions, inv_freq, heads)
        for got, same, wanted in zip(found[0][:3], found[1][:3], exact, strict=True):
            assert_as_good(got, same, wanted)
        for got, same in zip(found[0][3].data + found[0][3].scales, found[1][3].data + found[1][3].scales, strict=True):
            assert torch.equal(untouched(got), untouched(same))


def untouched(extent: Tensor) -> Tensor:
    """Where the poison still is."""
    return extent.float().isnan() if extent.is_floating_point() else extent[:, 0] == 85


def exact_q_k_v(qkv: Tensor, positions: Tensor, inv_freq: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    q, k, v = qkv.double().view(len(qkv), -1, heads.size).split((heads.query, heads.kv, heads.kv), 1)
    angle = (positions.float()[:, None] * inv_freq).double()[:, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    return turned(q), turned(k), v


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", sized((TINY, 5), {"llama-8b": (LLAMA_8B, 90), "qwen-7b": (QWEN_7B, 90)}))
def test_copies_of_blocks(name: str, size: tuple[Heads, int]) -> None:
    heads, count = size
    fmt = kv_format(name, torch.float16)
    results = []
    for op in (copy_blocks, copy_blocks_out):
        cache = LargeCache(fmt, heads, (16 * count,), room=16 * count)
        pairs = torch.stack((cache.order[:count], cache.order[count : 2 * count]), 1).contiguous()
        op(pairs, cache.blocks_per_extent, cache.data, cache.scales, cache.extent_table)
        results.append([extent.view(torch.uint8) for extent in cache.data + cache.scales])
    assert all(torch.equal(got, same) for got, same in zip(*results, strict=True))
    assert not torch.equal(
        results[0][0], LargeCache(fmt, heads, (16 * count,), room=16 * count).data[0].view(torch.uint8)
    )
