"""Runs one scheduled step on the model: grows the cache, builds the tensors, calls the model, checks the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import build_metadata
from engine.cuda_graph import DecodeGraphs
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache import KVCache
from engine.models.registry import DecoderModel
from engine.scheduler import ScheduledBatch

SMALL_STEP = 32
"""Steps of at most this many tokens run on one OpenMP thread (the compiled CPU kernels have threads of their own)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`logits` float32 [N, vocab], one row per item that wants them, in order; `finite`: one flag per item."""

    logits: Tensor
    finite: tuple[bool, ...]


class ModelRunner:
    """Owns model and KV tensors; knows nothing of turns or of who owns a block."""

    def __init__(self, model: DecoderModel, cache: KVCache, pool: BlockPool, max_seq_len: int) -> None:
        self.model = model
        self._graphs = DecodeGraphs(model, cache, max_seq_len) if model.stays_on_device else None
        self.cache = cache
        self.pool = pool
        self._threads = torch.get_num_threads()

    def execute(self, batch: ScheduledBatch, abandoned: Callable[[], bool] = lambda: False) -> StepResult:
        """Raises `StepAbandoned` if `abandoned()` came true before the step was over."""
        with self.threads_for(batch.token_count):
            return self._execute(batch, abandoned)

    @contextmanager
    def threads_for(self, token_count: int) -> Iterator[None]:
        """OpenMP's threads wait for each other at every small operation, and each wait costs milliseconds as soon as
        another program wants the processor: only large steps are worth more than one. It stays at one for sampling."""
        torch.set_num_threads(self._threads if token_count > SMALL_STEP else 1)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    def _execute(self, batch: ScheduledBatch, abandoned: Callable[[], bool]) -> StepResult:
        self.sync_blocks()
        token_ids, meta = build_metadata(batch, self.cache.spec.block_size, self.model.device)
        if self._graphs is not None and self._graphs.fits(meta) and len(meta.logit_rows) == len(token_ids):
            hidden, logits = self._graphs.run(token_ids, meta)
            return StepResult(logits, _finite_items(hidden, meta.query_lens))
        hidden = self.model.hidden_states(token_ids, self.cache, meta, abandoned)
        finite = _finite_items(hidden, meta.query_lens)
        return StepResult(self.model.head(hidden[meta.logit_rows]), finite)

    def sync_blocks(self) -> None:
        """Let the tensors reach as far as the pool's ids, and carry out its pending copies, before anything is read."""
        self.cache.grow(self.pool.high_water)
        copies = self.pool.take_copies()
        if copies:
            self.cache.copy_blocks(copies)

    def trim(self) -> None:
        """Give tensors above the highest used block back."""
        self.sync_blocks()
        self.cache.shrink(self.pool.trim())


def _finite_items(hidden: Tensor, query_lens: tuple[int, ...]) -> tuple[bool, ...]:
    """A token's own K and V take part in its output, so a bad value anywhere shows in the token's last hidden row."""
    sums = hidden.float().sum(dim=-1)
    if bool(torch.isfinite(sums.sum())):
        return (True,) * len(query_lens)
    return tuple(bool(torch.isfinite(rows).all()) for rows in sums.split(list(query_lens)))
