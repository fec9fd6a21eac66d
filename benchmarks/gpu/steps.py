"""Whole decode steps of one sequence, per weight format, against the bytes that they must read.

`step_ms`: the engine's replayed graph, queued without waiting: what the card needs. `tokens_per_s`: the engine itself,
with its thread, its sampling and its text. What its steps take longer than the card needs is the gap in which the card
waits (the few operations that sample count as waiting). Peer: transformers' `generate` with a static cache, compiled as
it chooses, with random weights of the same shape and dtype.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import median, spread
from benchmarks.gpu.random_model import config_json, plain_tokenizer, random_model, weight_format
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
from engine.memory_plan import MemoryPlan, ModelSizes, human_bytes, kv_bytes_per_token, plan_memory
from engine.protocol import Finished, GenerateRequest
from engine.sampling.params import SamplingParams
from engine.scheduler import ScheduledBatch, ScheduledItem
from engine.sequence import Sequence

WEIGHTS = ("F16", "Q8_0", "Q4_0", "Q4_K_M")
GOALS = {"F16": 0.80, "Q4_0": 0.70, "Q4_K_M": 0.70}
"""Share of the floor."""
GAP_GOAL = 0.05
OURS_SECONDS, PEER_SECONDS = 25, 110
SPARE = 2**28
"""Bytes beside a plan: the benchmark's own, and what libraries take."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Tokens before and in a measured reply, and steps that are queued at once."""

    prompt: int = 1024
    reply: int = 64
    queued: int = 20

    @property
    def context(self) -> int:
        """What a step in the middle of the reply sees."""
        return self.prompt + self.reply // 2

    @property
    def max_seq_len(self) -> int:
        return self.prompt + self.reply + 1


TINY_SETTING = Setting(prompt=12, reply=2, queued=1)


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
            Path("unused"), device=device.type, max_seq_len=setting.max_seq_len, block_size=BLOCK_SIZE
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
        raise SystemExit("The engine failed; its log says why.")

    def held(self) -> int:
        """Most bytes allocated since the weights were loaded; without a card what weights and cache take."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return self.model.weight_bytes + self._parts.cache.reserved_bytes

    def step(self) -> Callable[[], object]:
        """The decode step at the middle of the reply, over a cache of its own."""
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
        graphs.run(token_ids, meta)
        return lambda: graphs.run(token_ids, meta)

    def close(self) -> None:
        self._engine.close()


class Generate:
    """transformers with a static cache."""

    def __init__(self, shape: Shape, setting: Setting, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        values = config_json(shape)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device(device):
            self._model = AutoModelForCausalLM.from_config(config, dtype=weight_format(device).compute_dtype).eval()
        self._setting, self._ids = setting, torch.randint(shape.vocab, (1, setting.prompt), device=device)

    @classmethod
    def where_it_fits(cls, shape: Shape, setting: Setting, device: torch.device, budget: Budget) -> Generate | None:
        """Warmed up; None, and noted, if there is neither memory nor time for it, or it does not run here."""
        what = f"generate, {shape.name}"
        needed, free = int(1.2 * token_bytes(shape, "F16").held) + SPARE, free_bytes(device)
        if needed > free:
            budget.skip(what, f"needs {human_bytes(needed)}, {human_bytes(free)} are free")
            return None
        if not budget.allows(what, PEER_SECONDS):
            return None
        with budget.noting(what):
            found = cls(shape, setting, device)
            found.tokens_per_second()
            return found
        return None

    def close(self) -> None:
        """Compiled code holds on to graphs and their memory."""
        torch.compiler.reset()

    def tokens_per_second(self) -> float:
        """After the first token, as for the engine."""
        moments: list[float] = []

        def note(input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            moments.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        count = self._setting.reply
        self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            cache_implementation="static",
            stopping_criteria=[note],
            pad_token_id=0,
        )
        return (len(moments) - 1) / (moments[-1] - moments[0])


def rows(
    shapes: tuple[Shape, ...], setting: Setting, copy: float, timer: Timer, budget: Budget
) -> Iterator[dict[str, Any]]:
    """A row per shape and weight format that fits memory and time; `copy`: bytes per second of the card."""
    for shape in shapes:
        for weights in WEIGHTS:
            what, free = f"steps, {shape.name}, {weights}", free_bytes(timer.device)
            planned = memory_plan(shape, weights, "fp16", setting.max_seq_len, max(free - SPARE, 0))
            if not planned.fits:
                budget.skip(what, f"needs {human_bytes(planned.needed)}, {human_bytes(free)} are free")
            elif budget.allows(what, OURS_SECONDS):
                with budget.noting(what):
                    yield _row(shape, weights, setting, copy, timer, budget)
                gc.collect()


def _row(shape: Shape, weights: str, setting: Setting, copy: float, timer: Timer, budget: Budget) -> dict[str, Any]:
    ours = Ours(shape, weights, setting, timer.device)
    ours.tokens_per_second()
    held, step, kv_format = ours.held(), ours.step(), ours.kv_format
    peer = Generate.where_it_fits(shape, setting, timer.device, budget) if weights == "F16" else None
    together = peer is not None
    steps, speeds, peer_speeds = [], [], []
    for _ in range(timer.rounds):
        steps.append(timer.queued(step, setting.queued))
        speeds.append(ours.tokens_per_second())
        if peer is not None:
            peer_speeds.append(peer.tokens_per_second())
    ours.close()
    if peer is None and weights == "F16":
        del ours, step
        gc.collect()
        peer = Generate.where_it_fits(shape, setting, timer.device, budget)
        peer_speeds = [peer.tokens_per_second() for _ in range(timer.rounds)] if peer is not None else []
    if peer is not None:
        peer.close()
    size = step_bytes(shape, weights, kv_format, setting.context)
    planned = memory_plan(shape, weights, kv_format, setting.max_seq_len, 0).needed
    return {
        "model": shape.name,
        "weights": weights,
        "context": setting.context,
        "bytes": size,
        "floor_ms": 1e3 * size / copy,
        "step_ms": median(steps),
        "step_ms_spread": spread(steps),
        "tokens_per_s": median(speeds),
        "tokens_per_s_spread": spread(speeds),
        "generate_tokens_per_s": median(peer_speeds) if peer_speeds else None,
        "interleaved": together,
        **judged(weights, 1e3 * size / copy, median(steps), 1e3 / median(speeds)),
        "memory": held,
        "memory_plan": planned,
        "memory_met": held <= planned,
    }


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
