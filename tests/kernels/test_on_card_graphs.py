"""Decode steps of models as wide as real ones, replayed: the eager steps, while the pool grows, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.random_model import TINY, random_model
from benchmarks.roofline import MODELS, Shape, token_bytes
from engine.batch import AttentionMetadata
from engine.cuda_graph import DecodeGraphs
from engine.kv_cache.cache import KVCache
from engine.models.registry import DecoderModel
from kernels.kv_format import KV_FORMATS, fill_extent_table
from kernels.layer_groups import LayerGroup, default_places
from tests.support import interpreter_fp8
from tests.support.interpreter import is_interpreting
from tests.support.large_cache import poisoned
from tests.support.paged_cache import can_run
from tests.support.sizes import DEVICE, ON_CARD, large_tiles, need_memory, sized

BLOCK_SIZE, PER_EXTENT = 16, 1
WEIGHTS = ("F16", "Q8_0", "Q4_0", "Q4_K_M")


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if is_interpreting():
        interpreter_fp8.round_to_nearest(monkeypatch)
    yield from large_tiles()


def shortened(name: str) -> Shape:
    """Two layers of a real model."""
    found = next(shape for shape in MODELS if shape.name == name)
    sizes = (found.hidden, found.inner, found.num_heads, found.num_kv_heads, found.head_dim, found.vocab, found.context)
    return Shape(f"{name}, two layers", 2, *sizes, found.tied, found.qkv_bias)


@dataclass(frozen=True)
class _Spec:
    block_size: int = BLOCK_SIZE


class GrowingStore:
    """A `PagedStore` of any format, whose extents come one by one, each full of NaN but for the null block."""

    spec = _Spec()
    balance = None
    groups = (LayerGroup(),)

    def __init__(self, kv_format: str, shape: Shape, extents: int) -> None:
        self.kv_format, self.blocks_per_extent, self._shape = kv_format, PER_EXTENT, shape
        self.places = default_places(shape.num_layers)
        self.extents: list[Tensor] = []
        self.scale_extents: list[Tensor] = []
        self.extent_table = torch.zeros(extents, 2, dtype=torch.int64, device=DEVICE)

    def grow(self, blocks: int) -> None:
        fmt, shape = KV_FORMATS[self.kv_format], self._shape
        while len(self.extents) * PER_EXTENT < blocks:
            inner = (BLOCK_SIZE, shape.num_kv_heads)
            planes = ((2, fmt.data_width(shape.head_dim)), (fmt.scale_planes, fmt.scale_width(shape.head_dim)))
            pair = [
                poisoned((PER_EXTENT, shape.num_layers, kinds, *inner, width), dtype)
                for (kinds, width), dtype in zip(planes, (fmt.dtype, fmt.scale_dtype), strict=True)
            ]
            if not self.extents:
                for part in pair:
                    part[0] = 0
            self.extents.append(pair[0])
            self.scale_extents += pair[1:] if fmt.has_scales else []
            fill_extent_table(self.extent_table, self.extents, self.scale_extents)


class Decoding:
    """Two rows, from 16 tokens and from 1 on, fed the same ids whichever way they are run; blocks come when needed."""

    def __init__(self, model: DecoderModel, shape: Shape, kv_format: str, steps: int) -> None:
        blocks = 2 * (-(-(16 + steps) // BLOCK_SIZE)) + 1
        self.store = GrowingStore(kv_format, shape, -(-blocks // PER_EXTENT))
        self.model, self.shape, self.lens = model, shape, [16, 1]
        self.tables: list[list[int]] = [[], []]
        self.next_block = 1
        self._run(15, self.model.forward, rows=(0,), first=0)
        self.graphs = DecodeGraphs(model, cast(KVCache, self.store), max_seq_len=16 + steps)

    def step(self, run: Any) -> Tensor:
        logits = self._run(1, run, rows=(0, 1), first=None)
        self.lens = [length + 1 for length in self.lens]
        return logits

    def replay(self) -> Tensor:
        return self.step(lambda ids, _, meta: self.graphs.run(ids, meta)[1]).clone()

    def eager(self) -> Tensor:
        return self.step(self.model.forward)

    def _run(self, count: int, run: Any, rows: tuple[int, ...], first: int | None) -> Tensor:
        """`count` tokens of each row, from `first` on or the row's last."""
        ids, meta = self.inputs(count, rows, first)
        return run(ids, cast(KVCache, self.store), meta)

    def inputs(self, count: int, rows: tuple[int, ...], first: int | None) -> tuple[Tensor, AttentionMetadata]:
        starts = [self.lens[row] - 1 if first is None else first for row in rows]
        for row, start in zip(rows, starts, strict=True):
            while len(self.tables[row]) * BLOCK_SIZE < start + count:
                self.tables[row].append(self.next_block)
                self.next_block += 1
        self.store.grow(self.next_block)
        positions = [start + i for start in starts for i in range(count)]
        tables = [self.tables[row] for row in rows for _ in range(count)]
        slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t, p in zip(tables, positions, strict=True)]
        ids = [(31 * p + 7) % self.shape.vocab for p in positions]
        own = [self.tables[row] for row in rows]
        width = max(len(table) for table in own)
        ends = tuple(start + count for start in starts)
        meta = AttentionMetadata(
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor([slots]),
            block_tables=torch.tensor([[table + [0] * (width - len(table)) for table in own]], dtype=torch.int32),
            context_lens=torch.tensor(ends, dtype=torch.int32),
            cu_seqlens_q=torch.arange(len(rows) + 1, dtype=torch.int32) * count,
            logit_rows=torch.arange(len(positions)),
            query_lens=(count,) * len(rows),
            context_lens_host=ends,
        )
        return torch.tensor(ids, device=DEVICE), meta.to(DEVICE)


def plain_format(model: DecoderModel) -> str:
    return "bf16" if model.dtype is torch.bfloat16 else "fp16"


REAL = {name: (shortened(name), 64) for name in ("Llama-3-8B", "Qwen2.5-7B", "Llama-3.2-1B")}


def kinds_and_sizes(kinds: tuple[str, ...], tiny_kind: str) -> list[Any]:
    """Each kind at the size of each model, and one of them tiny."""
    return sized(
        (tiny_kind, TINY, 2), {f"{name}-{kind}": (kind, *size) for name, size in REAL.items() for kind in kinds}
    )


def assert_replayed_is_eager(model: DecoderModel, shape: Shape, kv_format: str, steps: int) -> None:
    with torch.inference_mode():
        eager, replayed = (Decoding(model, shape, kv_format, steps) for _ in range(2))
        captured_with = 0
        for step in range(steps):
            expected, found = eager.eager(), replayed.replay()
            captured_with = captured_with or len(replayed.store.extents)
            assert torch.isfinite(found).all(), step
            assert (found - expected).abs().max() <= 1e-3 * expected.abs().max(), step
        assert len(replayed.store.extents) > captured_with, "the pool did not grow under the graph"


@pytest.mark.parametrize("case", kinds_and_sizes(WEIGHTS, "Q4_K_M"))
def test_replayed_steps_are_eager_steps_for_each_weight_format(case: tuple[str, Shape, int]) -> None:
    weights, shape, steps = case
    need_memory(1.4 * token_bytes(shape, weights).held)
    model = random_model(shape, weights, DEVICE)
    assert_replayed_is_eager(model, shape, plain_format(model), steps)


@pytest.mark.parametrize("case", kinds_and_sizes(("int8", "fp8", "int4"), "int4"))
def test_replayed_steps_are_eager_steps_for_each_cache_format(case: tuple[str, Shape, int]) -> None:
    kv_format, shape, steps = case
    if not can_run(kv_format):
        pytest.skip("no fp8 on this card")
    need_memory(1.4 * token_bytes(shape, "Q8_0").held)
    assert_replayed_is_eager(random_model(shape, "Q8_0", DEVICE), shape, kv_format, steps)


@pytest.fixture
def steady() -> tuple[Decoding, Tensor, AttentionMetadata]:
    """A step that was captured and run, and its inputs on the card."""
    shape = shortened("Llama-3.2-1B")
    model = random_model(shape, "Q4_0", DEVICE)
    decoding = Decoding(model, shape, plain_format(model), steps=8)
    decoding.replay()
    ids, meta = decoding.inputs(1, (0, 1), None)
    decoding.graphs.run(ids, meta)
    torch.cuda.synchronize()
    return decoding, ids, meta


@pytest.mark.parametrize("repeats", [pytest.param(32, marks=ON_CARD)])
def test_a_replay_allocates_nothing(repeats: int, steady: tuple[Decoding, Tensor, AttentionMetadata]) -> None:
    decoding, ids, meta = steady
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(repeats):
        decoding.graphs.run(ids, meta)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("repeats", [pytest.param(4, marks=ON_CARD)])
def test_a_replay_does_not_wait(repeats: int, steady: tuple[Decoding, Tensor, AttentionMetadata]) -> None:
    """Copying the sampled ids is the only time that the host waits, and that comes after."""
    decoding, ids, meta = steady
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(repeats):
            decoding.graphs.run(ids, meta)
        with pytest.raises(RuntimeError):
            ids.tolist()  # a host that waits would be seen
    finally:
        torch.cuda.set_sync_debug_mode("default")
