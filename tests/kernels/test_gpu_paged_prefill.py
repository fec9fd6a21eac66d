"""Chunks over a paged cache: kernel and reference against attention written out in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import paged_prefill as prefill
from kernels.reference import paged
from tests.support.paged_cache import (
    SHUFFLED,
    PagedCache,
    assert_as_exact,
    attend,
    can_run,
    checked_integers,
    frequencies,
    random,
    rotate,
    tensors_where_kernels_run,
)

BLOCK = 8
# Query tokens and context of each sequence: a whole prompt, chunks over blocks of past, single tokens, an idle row.
SEQUENCES = ((BLOCK + 1, BLOCK + 1), (3, BLOCK), (0, 5), (1, 1), (20, 3 * BLOCK + 5), (1, BLOCK - 1))
HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def on_the_device():
    yield from tensors_where_kernels_run()


class Batch:
    """Chunks of different length over one shuffled cache in which every slot past a context is poisoned."""

    def __init__(self, kv_format, head_dim, group, dtype, kv_heads=1, rotated=False, sink_q=False, **options):
        self.cache = PagedCache(kv_format, head_dim, kv_heads, block_size=BLOCK)
        self.options, self.scale = options, head_dim**-0.5
        self.inv_freq = frequencies(head_dim) if rotated else None
        self.bounds = torch.tensor([0, *(count for count, _ in SEQUENCES)]).cumsum(0).int()
        self.contexts = torch.tensor([context for _, context in SEQUENCES], dtype=torch.int32)
        self.q = random(int(self.bounds[-1]), group * kv_heads, head_dim).to(dtype)
        self.sink_q = random(*self.q.shape, seed=99).to(dtype) if sink_q else None
        if sink_q:
            # It is q turned to position window + sinks - 1 at most, so that up to there it is q itself.
            for (count, context), end in zip(SEQUENCES, self.bounds.tolist()[1:], strict=True):
                turned = max(end - context + options["window"] + options["sinks"] - 1, end - count)
                self.sink_q[end - count : turned] = self.q[end - count : turned]
        self.tables = torch.zeros(len(SEQUENCES), 5, dtype=torch.int32)
        free, exact, same_maths = list(SHUFFLED), [], []
        for row, (count, context) in enumerate(SEQUENCES):
            if count == 0:
                continue
            blocks = [free.pop() for _ in range(-(-context // BLOCK))]
            self.tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            keys, values = (random(context, kv_heads, head_dim, seed=2 * row + i).to(dtype) for i in (1, 2))
            keys, values = self.cache.write(1, blocks, keys, values)
            if options.get("window"):
                unseen = range(options.get("sinks", 0), context - count + 1 - options["window"])
                self.cache.poison(1, blocks, unseen)
            if rotated:
                keys = rotate(keys, torch.arange(context), self.inv_freq, 1.25)
            chunk = slice(self.bounds[row], self.bounds[row + 1])
            inputs = self.q[chunk], keys, values, self.scale
            asked = {**options, "sink_q": self.sink_q[chunk] if sink_q else None}
            exact.append(attend(*inputs, torch.float64, **asked))
            same_maths.append(attend(*inputs, dtype, **asked))
        self.exact, self.same_maths = torch.cat(exact), torch.cat(same_maths)

    def run(self, op, **launch):
        out = torch.full_like(self.q, float("nan"))
        options = (self.options.get("window", 0), self.options.get("sinks", 0), self.options.get("soft_cap", 0.0))
        op(
            self.q, self.bounds, self.tables, self.contexts, 20, self.scale, *options, self.inv_freq, 1.25,
            *self.cache.where(1), out, self.sink_q, **launch,
        )  # fmt: skip
        assert_as_exact(out, self.same_maths, self.exact)


LARGE = {"params": {"BLOCK_M": 64, "BLOCK_N": 16}}
SMALL = {"params": {"BLOCK_M": 16, "BLOCK_N": 16}}


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "group", "dtype", "launch"),
    [
        ("fp32", 64, 3, FLOAT, LARGE),
        ("fp32", 80, 7, FLOAT, LARGE),
        ("fp16", 64, 7, HALF, LARGE),
        ("fp16", 80, 1, HALF, SMALL),
        ("fp16", 128, 4, HALF, LARGE),
        ("fp16", 256, 3, HALF, LARGE),
        ("bf16", 64, 3, FLOAT, LARGE),
        ("int8", 96, 3, HALF, LARGE),
        ("int8", 64, 1, FLOAT, SMALL),
        ("int4", 80, 4, HALF, LARGE),
        ("int4", 128, 1, FLOAT, SMALL),
        ("fp8", 64, 4, HALF, LARGE),
    ],
)
def test_formats_head_sizes_and_groups(kv_format, head_dim, group, dtype, launch):
    if not can_run(kv_format):
        pytest.skip("no fp8 on this card")
    batch = Batch(kv_format, head_dim, group, dtype, kv_heads=2 if group == 1 else 1)
    batch.run(paged.paged_prefill)
    batch.run(prefill.launch_paged_prefill, **launch)


@pytest.mark.parametrize(
    ("kv_format", "launch", "options"),
    [
        ("fp16", SMALL, {"window": 9}),
        ("fp16", SMALL, {"window": 4, "sinks": 3}),
        # Later rows of a tile of queries see nothing of its first tile of keys.
        ("int8", LARGE, {"window": 1}),
        ("fp16", LARGE, {"soft_cap": 2.0}),
        ("int8", SMALL, {"window": 6, "sinks": 9, "soft_cap": 1.5}),
    ],
    ids=str,
)
def test_windows_sinks_and_soft_cap(kv_format, launch, options):
    batch = Batch(kv_format, 64, 3, HALF, **options)
    batch.run(paged.paged_prefill)
    batch.run(prefill.launch_paged_prefill, **launch)


@pytest.mark.parametrize(
    ("kv_format", "launch", "options"),
    [
        ("fp16", SMALL, {"window": 4, "sinks": 3}),
        # Sinks that lie beyond the window of some rows of a tile and not of others.
        ("int8", LARGE, {"window": 3, "sinks": 12}),
        ("fp32", LARGE, {"window": 9, "sinks": 2}),
        ("int4", SMALL, {"window": 6, "sinks": 30}),
    ],
    ids=str,
)
def test_sinks_beyond_the_window_have_queries_of_their_own(kv_format, launch, options):
    batch = Batch(kv_format, 64, 3, FLOAT if kv_format == "fp32" else HALF, sink_q=True, **options)
    batch.run(paged.paged_prefill)
    batch.run(prefill.launch_paged_prefill, **launch)


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "window"), [("fp16", 80, 0), ("int8", 64, 7), ("int4", 96, 7), ("fp32", 128, 0)]
)
def test_keys_stored_before_rope_are_turned_when_read(kv_format, head_dim, window):
    dtype = FLOAT if kv_format == "fp32" else HALF
    batch = Batch(kv_format, head_dim, 3, dtype, rotated=True, window=window, sinks=2)
    batch.run(paged.paged_prefill)
    batch.run(prefill.launch_paged_prefill, **LARGE)


def test_offsets_past_two_to_the_31():
    cache = PagedCache.vast("int8", 256)
    last = cache.blocks_per_extent - 1
    keys, values = cache.write(31, [last], random(5, 1, 256, seed=1), random(5, 1, 256, seed=2))
    q, out = random(2, 2, 256), torch.empty(2, 2, 256)
    bounds, context = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 2], [5]))
    with checked_integers():
        prefill.launch_paged_prefill(
            q, bounds, torch.tensor([[last]], dtype=torch.int32), context, 2, 0.1, 0, 0, 0.0, None, 1.0,
            *cache.where(31), out, **SMALL,
        )  # fmt: skip
    assert_as_exact(out, attend(q, keys, values, 0.1, FLOAT), attend(q, keys, values, 0.1, torch.float64))


def test_the_registered_op_is_the_kernel():
    Batch("int8", 64, 3, HALF).run(torch.ops.kvscope.paged_prefill)


def test_what_does_not_fit_is_said():
    batch = Batch("fp16", 64, 3, HALF)
    batch.bounds = batch.bounds[:-1]
    with pytest.raises(ValueError, match="cu_seqlens_q must be contiguous int32"):
        batch.run(prefill.launch_paged_prefill)
