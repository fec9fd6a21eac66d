"""Runs one scheduled step: grows the cache, builds the tensors, calls the model, checks what it made, draws tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.batch import build_metadata
from engine.cuda_graph import DecodeGraphs, padded_rows
from engine.debugging.timeline import StepTimes
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache import KVCache
from engine.kv_cache.ssm_state import SSMStatePool
from engine.models.registry import DecoderModel
from engine.sampling.sampler import SamplingState
from engine.sampling.step import Drafts, Forced, StepOutput, StepTokens, sample_on_host
from engine.scheduler import ScheduledBatch

if TYPE_CHECKING:
    from engine.sampling.device_sampler import DeviceSampler

SMALL_STEP = 32
"""Steps of at most this many tokens run on one OpenMP thread (the compiled CPU kernels have threads of their own)."""


class ModelRunner:
    """Owns model and KV tensors; knows nothing of turns or of who owns a block."""

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        pool: BlockPool,
        max_seq_len: int,
        max_sequences: int,
        states: SSMStatePool | None = None,
        state_slots: BlockPool | None = None,
    ) -> None:
        self.model = model
        self._graphs = DecodeGraphs(model, cache, max_seq_len) if model.stays_on_device else None
        self._sampler = _device_sampler(model, padded_rows(max_sequences)) if model.samples_on_device else None
        self.most_rows = SMALL_STEP if self._sampler is None else min(SMALL_STEP, padded_rows(max_sequences))
        """Of a step with drafts."""
        self.cache = cache
        self.pool = pool
        self.states = states
        self._state_slots = state_slots
        self._threads = torch.get_num_threads()
        self.times = StepTimes()

    def execute(
        self,
        batch: ScheduledBatch,
        requests: Sequence[SamplingState],
        forced: Forced,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> StepTokens:
        """Run a batch; `requests` and `forced` belong to its items that want logits, in order. An item with drafts has
        a row of logits and a flag for each of its tokens (`row_count`), any other one each.

        Raises `StepAbandoned` if `abandoned()` came true before the step was over.
        """
        drafts = None
        if any(item.drafts for item in batch.items):
            requests, forced, drafts = _rows(batch, requests, forced)
        if self._sampler is not None:
            self._sampler.prepare(requests, forced, drafts)
        with self.threads_for(batch.token_count):
            output, drawn = self._execute(batch, abandoned)
        if self._sampler is None or drawn is None:
            return sample_on_host(output, requests, forced, drafts)
        return self._sampler.tokens(drawn, output, requests, forced, drafts)

    def verifies(self, request: SamplingState) -> bool:
        """Whether drafts of this request can be run."""
        return self.states is None and (self._sampler is None or self._sampler.verifies(request))

    def step_size(self, rows: int) -> int:
        """Steps of sizes that are told apart cost differently: graphs have buckets, the processor's kernels tiles of
        four rows."""
        return rows if rows == 1 else padded_rows(rows) if self._graphs is not None else -(-rows // 4) * 4

    @contextmanager
    def threads_for(self, token_count: int) -> Iterator[None]:
        """OpenMP's threads wait for each other at every small operation, and each wait costs milliseconds as soon as
        another program wants the processor: only large steps are worth more than one. It stays at one for sampling."""
        torch.set_num_threads(self._threads if token_count > SMALL_STEP else 1)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    def _execute(self, batch: ScheduledBatch, abandoned: Callable[[], bool]) -> tuple[StepOutput, Tensor | None]:
        """With what the device's sampler launched, if there is one."""
        self.sync_blocks()
        self.times.copied = time.perf_counter()
        token_ids, meta = build_metadata(batch, self.cache.spec.block_size, self.model.device)
        wanting = [item.wants_logits for item in batch.items for _ in range(item.row_count)]
        wanted = tuple(index for index, wants in enumerate(wanting) if wants)
        if self._graphs is not None and self._graphs.fits(meta) and len(wanted) == len(token_ids):
            hidden, logits, drawn = self._graphs.run(token_ids, meta, self._sampler, self.states)
        else:
            hidden, logits = self.model.step(token_ids, self.cache, meta, self.states, abandoned)
            drawn = self._sampler.launch(hidden, logits, meta) if self._sampler is not None else None
        self.times.computed = time.perf_counter()
        return StepOutput(hidden, logits, meta.query_lens, wanted), drawn

    def sync_blocks(self) -> None:
        """Let the tensors reach as far as the pool's ids, and carry out its pending copies, before anything is read."""
        self.cache.grow(self.pool.high_water)
        copies = self.pool.take_copies()
        if copies:
            self.cache.copy_blocks(copies)
        if self.states is not None and self._state_slots is not None:
            self.states.copy(self._state_slots.take_copies())

    def trim(self) -> None:
        """Give tensors above the highest used block, and the highest used slot, back."""
        self.sync_blocks()
        self.cache.shrink(self.pool.trim())
        if self.states is not None and self._state_slots is not None:
            self.states.trim(self._state_slots.trim())


def _rows(
    batch: ScheduledBatch, requests: Sequence[SamplingState], forced: Forced
) -> tuple[Sequence[SamplingState], Forced, Drafts]:
    """Requests, forced ids and drafts of each row of logits, from those of each item that wants some."""
    counts = [item.row_count for item in batch.items if item.wants_logits]
    states = [state for state, count in zip(requests, counts, strict=True) for _ in range(count)]
    given = [row for token_id, count in zip(forced, counts, strict=True) for row in (token_id, *[None] * (count - 1))]
    return states, given, [row for item in batch.items if item.wants_logits for row in (None, *item.drafts)]


def _device_sampler(model: DecoderModel, max_rows: int) -> DeviceSampler:
    """Imported where there is Triton."""
    from engine.sampling.device_sampler import DeviceSampler

    return DeviceSampler(model.config.vocab_size, model.device, max_rows)
