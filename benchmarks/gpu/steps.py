"""Whole decode steps of one sequence, per weight format, against the bytes that they must read.

`step_ms`: the engine's replayed graph, queued without waiting: what the card needs. `tokens_per_s`: the engine itself,
with its thread and its text. What its steps take longer than the card needs, draw of the token included, is the gap in
which the card waits. Peer: transformers' `generate` with a static cache, compiled as it chooses, with random weights of
the same shape and dtype.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import median, spread
from benchmarks.gpu.generate import Generate
from benchmarks.gpu.random_model import plain_tokenizer, random_model
from benchmarks.gpu.setting import SPARE, Setting
from benchmarks.gpu.timing import Budget, Timer, free_bytes
from benchmarks.roofline import BLOCK_SIZE, VALUE, Shape, token_bytes
from engine.batch import build_metadata
from engine.config import EngineConfig
from engine.cuda_graph import DecodeGraphs
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache import KVCache
from engine.kv_cache.prefix_cache import PrefixCache
from engine.loader import CUDA_LIMITS, EngineParts, assemble
from engine.local import LocalEngine
from engine.memory.plan import MemoryPlan, ModelSizes, human_bytes, kv_bytes_per_token, plan_memory
from engine.protocol import Finished, GenerateRequest
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingState
from engine.scheduler import ScheduledBatch, ScheduledItem
from engine.sequence import Sequence

GOALS = {"F16": 0.80, "Q4_0": 0.70, "Q4_K_M": 0.70}
"""Share of the floor."""
GAP_GOAL = 0.05
OURS_SECONDS = 25


def step_bytes(shape: Shape, weights: str, kv_format: str, context: int) -> int:
    """What one token's step moves at least: `benchmarks.roofline`'s bound."""
    parts = token_bytes(shape, weights)
    per_token = kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, kv_format)
    return parts.weights + parts.activations + per_token * context


def memory_plan(shape: Shape, weights: str, kv_format: str, max_seq_len: int, free: int) -> MemoryPlan:
    """The engine's own plan for one conversation of `max_seq_len`."""
    sizes = ModelSizes(
        weight_bytes=token_bytes(shape, weights).held,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        vocab_size=shape.vocab,
        context_tokens=max_seq_len,
    )
    return plan_memory(
        sizes,
        kv_format=kv_format,
        block_size=BLOCK_SIZE,
        kv_budget=free,
        available=free,
        total_device=free,
        max_seq_len=max_seq_len,
        batch_tokens=CUDA_LIMITS.max_batch_tokens,
        compute_bytes=VALUE,
    )


class Ours:
    """The engine with one model, and its decode step on its own."""

    def __init__(self, shape: Shape, weights: str, setting: Setting, device: torch.device) -> None:
        self.setting, self.device = setting, device
        self._prompt = tuple(torch.randint(shape.vocab, (setting.prompt,)).tolist())
        self._before = _allocated(device)
        self.model = random_model(shape, weights, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        config = EngineConfig(
            Path("unused"),
            device=device.type,
            max_seq_len=setting.max_seq_len,
            block_size=BLOCK_SIZE,
            speculation="off",
        )
        self._parts: EngineParts = assemble(config, self.model, plain_tokenizer(shape.vocab), shape.name)
        self.kv_format = self._parts.kv_format
        self._engine = LocalEngine(config, lambda _: self._parts)
        self._engine.start()
        self._engine.wait_ready()

    def tokens_per_second(self) -> float:
        """Of a greedy reply after its first token."""
        params = SamplingParams(temperature=0, max_tokens=self.setting.reply, ignore_eos=True)
        for event in self._engine.generate(GenerateRequest(self._prompt, params, None)):
            if isinstance(event, Finished) and event.stats.decode_tokens_per_s:
                return event.stats.decode_tokens_per_s
        raise RuntimeError("the engine failed; its log says why")

    def held(self) -> int:
        """Most bytes allocated since the weights were loaded; without a card what weights and cache take."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return self.model.weight_bytes + self._parts.cache.reserved_bytes

    def step(self) -> Callable[[], object]:
        """The decode step at the middle of the reply, up to its token, over a cache of its own."""
        spec, count = self._parts.cache.spec, self.setting.context
        blocks = -(-count // spec.block_size) + 1
        cache = KVCache(spec, self.device, max_blocks=blocks)
        cache.grow(blocks)
        for extent in cache.extents:
            extent.normal_()
        sequence = Sequence(PrefixCache(BlockPool(blocks), spec.block_size))
        sequence.set_tokens([1] * count)
        sequence.reserve(count)
        batch = ScheduledBatch((ScheduledItem(sequence, count - 1, 1, True),))
        token_ids, meta = build_metadata(batch, spec.block_size, self.device)
        graphs = DecodeGraphs(self.model, cache, self.setting.max_seq_len)
        vocab_size = self.model.config.vocab_size
        sampler = DeviceSampler(vocab_size, self.device, 1)
        sampler.prepare([SamplingState(SamplingParams(temperature=0), (), vocab_size)], [None])
        graphs.run(token_ids, meta, sampler)
        return lambda: graphs.run(token_ids, meta, sampler)

    def close(self) -> None:
        self._engine.close()


def rows(
    shapes: tuple[Shape, ...], setting: Setting, copy: float, timer: Timer, budget: Budget
) -> Iterator[dict[str, Any]]:
    """A row per shape and weight format that fits memory and time; `copy`: bytes per second of the card."""
    for shape in shapes:
        for weights in setting.weights:
            what, free = f"steps, {shape.name}, {weights}", free_bytes(timer.device)
            planned = memory_plan(shape, weights, "fp16", setting.max_seq_len, max(free - SPARE, 0))
            if not planned.fits:
                budget.skip(what, f"needs {human_bytes(planned.needed)}, {human_bytes(free)} are free")
            elif budget.allows(what, OURS_SECONDS):
                with budget.noting(what):
                    yield _row(shape, weights, setting, copy, timer, budget)
                gc.collect()


def _row(shape: Shape, weights: str, setting: Setting, copy: float, timer: Timer, budget: Budget) -> dict[str, Any]:
    found = _measured(shape, weights, setting, timer, budget)
    size = step_bytes(shape, weights, found.kv_format, setting.context)
    planned = memory_plan(shape, weights, found.kv_format, setting.max_seq_len, 0).needed
    step_ms, speed, other = median(found.step_ms), median(found.tokens_per_s), found.generate_tokens_per_s
    return {
        "model": shape.name,
        "weights": weights,
        "context": setting.context,
        "bytes": size,
        "floor_ms": 1e3 * size / copy,
        "step_ms": step_ms,
        "step_ms_spread": spread(found.step_ms),
        "tokens_per_s": speed,
        "tokens_per_s_spread": spread(found.tokens_per_s),
        "generate_tokens_per_s": median(other) if other else None,
        "generate_tokens_per_s_spread": spread(other) if other else None,
        "interleaved": found.interleaved,
        **judged(weights, 1e3 * size / copy, step_ms, 1e3 / speed),
        "memory": found.memory,
        "memory_plan": planned,
        "memory_met": found.memory <= planned,
    }


@dataclass(slots=True)
class _Measured:
    """A figure per round; `interleaved`: `generate` took its turns with the engine, else it ran afterwards."""

    kv_format: str
    memory: int
    interleaved: bool
    step_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    generate_tokens_per_s: list[float] = field(default_factory=list)


def _measured(shape: Shape, weights: str, setting: Setting, timer: Timer, budget: Budget) -> _Measured:
    compared = weights == "F16"
    peer = None
    with closing(Ours(shape, weights, setting, timer.device)) as ours:
        ours.tokens_per_second()
        memory, step = ours.held(), ours.step()
        beside = compared and Generate.needs(shape) <= free_bytes(timer.device)
        if beside:
            peer = Generate.where_it_fits(shape, setting, timer.device, budget)
        found = _Measured(ours.kv_format, memory, interleaved=peer is not None)
        for _ in range(timer.rounds):
            found.step_ms.append(timer.queued(step, setting.queued))
            found.tokens_per_s.append(ours.tokens_per_second())
            if peer is not None:
                found.generate_tokens_per_s.append(peer.tokens_per_second())
    if compared and not beside:
        del ours, step
        gc.collect()
        peer = Generate.where_it_fits(shape, setting, timer.device, budget)
        found.generate_tokens_per_s = [peer.tokens_per_second() for _ in range(timer.rounds)] if peer else []
    if peer is not None:
        peer.close()
    return found


def judged(weights: str, floor_ms: float, step_ms: float, engine_ms: float) -> dict[str, Any]:
    """Shares against their goals: of the floor in the step, and of the engine's time per token in waiting."""
    share, gap, goal = floor_ms / step_ms, max(1 - step_ms / engine_ms, 0.0), GOALS.get(weights)
    return {
        "share": share,
        "goal": goal,
        "met": None if goal is None else share >= goal,
        "host_gap": gap,
        "host_gap_goal": GAP_GOAL,
        "host_gap_met": gap < GAP_GOAL,
    }


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
