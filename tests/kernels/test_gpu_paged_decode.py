"""Split-KV decode over a paged cache: kernel and reference against attention written out in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels.gpu import paged_decode as decode
from kernels.gpu import tuning
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
CONTEXTS = (1, BLOCK - 1, 0, BLOCK, BLOCK + 1, 5 * BLOCK + 5)


@pytest.fixture(autouse=True)
def on_the_device():
    yield from tensors_where_kernels_run()


class Batch:
    """Rows of all context lengths over one shuffled cache; row 2 is padding."""

    def __init__(
        self, kv_format, head_dim, group, dtype, kv_heads=1, rotated=False, key_scale=1.0, sink_q=False, **options
    ):
        self.cache = PagedCache(kv_format, head_dim, kv_heads, block_size=BLOCK)
        self.dtype, self.options, self.scale = dtype, options, head_dim**-0.5
        self.inv_freq = frequencies(head_dim) if rotated else None
        self.q = random(len(CONTEXTS), group * kv_heads, head_dim).to(dtype)
        self.sink_q = random(*self.q.shape, seed=99).to(dtype) if sink_q else None
        self.tables = torch.zeros(len(CONTEXTS), 7, dtype=torch.int32)
        free, self.exact, self.same_maths = list(SHUFFLED), [], []
        for row, context in enumerate(CONTEXTS):
            blocks = [free.pop() for _ in range(-(-context // BLOCK))]
            self.tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            if context == 0:
                self.exact.append(torch.zeros(self.q.shape[1:], dtype=torch.float64))
                self.same_maths.append(self.exact[-1])
                continue
            keys = random(context, kv_heads, head_dim, seed=2 * row + 1).to(dtype) * key_scale
            keys, values = self.cache.write(
                1, blocks, keys, random(context, kv_heads, head_dim, seed=2 * row + 2).to(dtype)
            )
            if options.get("window"):
                self.cache.poison(1, blocks, range(options.get("sinks", 0), context - options["window"]))
            if rotated:
                keys = rotate(keys, torch.arange(context), self.inv_freq, 1.25)
            inputs = self.q[row : row + 1], keys, values, self.scale
            asked = {**options, "sink_q": self.sink_q[row : row + 1] if sink_q else None}
            self.exact.append(attend(*inputs, torch.float64, **asked)[0])
            self.same_maths.append(attend(*inputs, dtype, **asked)[0].double())

    def run(self, op, splits=2, newest=0, **launch):
        shapes = decode.workspace_shapes(*self.q.shape, splits)
        partial_out, partial_stats = (torch.full(shape, float("nan")) for shape in shapes)
        out = torch.full_like(self.q, float("nan"))
        options = (self.options.get("window", 0), self.options.get("sinks", 0), self.options.get("soft_cap", 0.0))
        op(
            self.q, self.tables, torch.tensor(CONTEXTS, dtype=torch.int32), self.scale, *options, self.inv_freq, 1.25,
            newest, *self.cache.where(1), partial_out, partial_stats, out, self.sink_q, **launch,
        )  # fmt: skip
        assert_as_exact(out, torch.stack(self.same_maths), torch.stack(self.exact))
        assert torch.equal(out[CONTEXTS.index(0)], torch.zeros_like(out[0]))


DOT = {"capability": 80, "params": {"BLOCK_N": 16}}
NO_DOT = {"capability": 75, "params": {"BLOCK_N": 16}}
HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "group", "dtype", "launch"),
    [
        ("fp32", 64, 3, FLOAT, NO_DOT),
        ("fp32", 80, 7, FLOAT, DOT),
        ("fp16", 64, 3, HALF, DOT),
        ("fp16", 80, 7, HALF, DOT),
        ("fp16", 96, 4, HALF, NO_DOT),
        ("fp16", 128, 1, HALF, NO_DOT),
        ("fp16", 256, 4, HALF, DOT),
        ("bf16", 64, 3, FLOAT, NO_DOT),
        ("int8", 64, 7, HALF, NO_DOT),
        ("int8", 128, 4, HALF, DOT),
        ("int8", 80, 3, FLOAT, NO_DOT),
        ("int4", 96, 7, HALF, DOT),
        ("int4", 80, 3, FLOAT, NO_DOT),
        ("int4", 256, 1, HALF, DOT),
        ("int4", 16, 1, HALF, DOT),
        ("fp8", 64, 4, HALF, DOT),
        ("fp8", 80, 1, HALF, NO_DOT),
    ],
)
def test_formats_head_sizes_and_groups(kv_format, head_dim, group, dtype, launch):
    if not can_run(kv_format):
        pytest.skip("no fp8 on this card")
    batch = Batch(kv_format, head_dim, group, dtype, kv_heads=2 if group == 3 else 1)
    batch.run(paged.paged_decode)
    batch.run(decode.launch_paged_decode, **launch)


@pytest.mark.parametrize(
    ("kv_format", "options"),
    [
        ("fp16", {"window": 9}),
        ("int8", {"window": 9, "sinks": 3}),
        ("fp16", {"window": 1, "sinks": 30}),
        ("fp16", {"soft_cap": 2.0}),
        ("int8", {"window": 12, "sinks": 2, "soft_cap": 1.5}),
    ],
    ids=str,
)
def test_windows_sinks_and_soft_cap(kv_format, options):
    batch = Batch(kv_format, 64, 4, HALF, **options)
    batch.run(paged.paged_decode)
    batch.run(decode.launch_paged_decode, **DOT)


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "launch", "window"),
    [
        ("fp16", 80, DOT, 0),
        ("int8", 64, NO_DOT, 10),
        ("int4", 128, DOT, 10),
        ("int4", 80, DOT, 0),
        ("fp32", 64, NO_DOT, 0),
    ],
)
def test_keys_stored_before_rope_are_turned_when_read(kv_format, head_dim, launch, window):
    dtype = FLOAT if kv_format == "fp32" else HALF
    batch = Batch(kv_format, head_dim, 4, dtype, rotated=True, window=window, sinks=2)
    batch.run(paged.paged_decode)
    batch.run(decode.launch_paged_decode, **launch)


@pytest.mark.parametrize(
    ("kv_format", "options", "splits", "newest"),
    [
        ("fp16", {"window": 9, "sinks": 3}, 2, 0),
        ("int8", {"window": 17, "sinks": 20}, 3, 0),
        ("fp32", {"window": 40, "sinks": 4}, 1, 16),
        ("int4", {"window": 5, "sinks": 1}, 7, 0),
    ],
    ids=str,
)
def test_sinks_beyond_the_window_have_queries_of_their_own(kv_format, options, splits, newest):
    batch = Batch(kv_format, 64, 4, FLOAT if kv_format == "fp32" else HALF, sink_q=True, **options)
    batch.run(paged.paged_decode)
    batch.run(decode.launch_paged_decode, splits=splits, newest=newest, **DOT)


@pytest.mark.parametrize(
    ("kv_format", "newest", "launch"),
    [
        ("fp16", 1, DOT),
        ("fp16", 16, DOT),
        ("int8", 16, NO_DOT),
        ("int4", 20, DOT),
        ("fp8", 9, DOT),
        ("fp16", 1000, DOT),
    ],
)
def test_newest_tokens_may_stay_in_the_l2_cache(kv_format, newest, launch):
    """Two loops, split anywhere, see every key once."""
    if not can_run(kv_format):
        pytest.skip("no fp8 on this card")
    Batch(kv_format, 64, 4, HALF, window=20, sinks=1).run(decode.launch_paged_decode, newest=newest, **launch)


@pytest.mark.parametrize("capability", tuning.CAPABILITIES)
def test_steps_ask_for_it_from_8_0_on(capability, monkeypatch):
    monkeypatch.setattr(tuning, "capability", lambda: capability)
    assert (decode.newest_tokens() > 0) == (capability >= 80)
    if capability >= 80:  # copies ahead would drop the policy
        for head_dim, kv_format in product((64, 128, 256), ("bf16", "int8")):
            variant = decode._hinted(kv_format)
            assert tuning.attention_params("paged_decode", head_dim, variant, capability)["STAGES"] == 1


@pytest.mark.parametrize("splits", [1, 7])
def test_any_number_of_splits(splits):
    Batch("fp16", 64, 4, HALF).run(decode.launch_paged_decode, splits=splits, capability=80, params={"BLOCK_N": 16})


def test_a_group_larger_than_the_rows_of_a_program():
    Batch("fp16", 64, 7, HALF).run(decode.launch_paged_decode, capability=75, params={"BLOCK_N": 32, "MAX_ROWS": 2})


def test_scores_far_from_zero():
    """Keys 30 times larger: weights of nearly one and zero, and maxima that differ much between splits."""
    Batch("fp32", 64, 3, FLOAT, key_scale=30.0).run(decode.launch_paged_decode, **NO_DOT)


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_offsets_past_two_to_the_31(kv_format):
    """The last block of an extent of more than 2**31 bytes, of which only a few pages are ever touched."""
    cache = PagedCache.vast(kv_format, 256)
    last = cache.blocks_per_extent - 1
    decode_table = torch.tensor([[last]], dtype=torch.int32)
    keys, values = cache.write(31, [last], random(3, 1, 256, seed=1), random(3, 1, 256, seed=2))
    assert cache.data[0][-1, -1].storage_offset() > 2**31
    q, out = random(1, 2, 256), torch.empty(1, 2, 256)
    workspaces = [torch.empty(shape) for shape in decode.workspace_shapes(1, 2, 256, 1)]
    with checked_integers():
        decode.launch_paged_decode(
            q, decode_table, torch.tensor([3], dtype=torch.int32), 0.1, 0, 0, 0.0, None, 1.0, 0, *cache.where(31),
            *workspaces, out, params={"BLOCK_N": 16},
        )  # fmt: skip
    assert_as_exact(out, attend(q, keys, values, 0.1, FLOAT), attend(q, keys, values, 0.1, torch.float64))


def test_the_registered_op_is_the_kernel():
    Batch("int8", 64, 3, FLOAT).run(torch.ops.kvscope.paged_decode)


def test_what_does_not_fit_is_said():
    batch = Batch("fp16", 64, 4, HALF)
    batch.tables = batch.tables.long()
    with pytest.raises(ValueError, match="block_tables must be int32"):
        batch.run(decode.launch_paged_decode)
    batch = Batch("fp16", 64, 4, HALF)
    batch.cache.kv_format = "int8"
    with pytest.raises(ValueError, match="another shape or dtype"):
        batch.run(decode.launch_paged_decode)
    batch = Batch("fp16", 512, 1, HALF)
    with pytest.raises(ValueError, match="at most 256 channels"):
        batch.run(decode.launch_paged_decode)
