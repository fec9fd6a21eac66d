"""Decode steps as CUDA graphs: one per batch-size bucket, captured when it is first needed, then replayed.

A graph repeats the very launches that were captured, with the same addresses and the same Python numbers. So what
changes from step to step lies in tensors that stay (`StaticBatch`), rows up to the bucket's size are padded with the
null block, and the pool may grow because kernels find its extents through a table on the device. Recurrent states
are copied to an address that stays and back.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.kv_cache.ssm_state import FixedStates, SSMStatePool
from engine.models.registry import DecoderModel

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
WARM_UPS = 2
"""Runs before a capture: kernels are compiled and workspaces allocated outside the graph."""


def padded_rows(count: int) -> int:
    """The size of the bucket that takes `count` rows, or, where none does, `count`."""
    return next((size for size in BUCKETS if size >= count), count)


class GraphTail(Protocol):
    """What follows the model in the same graph, e.g. the sampler."""

    @property
    def variant(self) -> Hashable:
        """Names the launches that `launch` is about to make: each variant gets graphs of its own."""

    def launch(self, hidden: Tensor, logits: Tensor, meta: AttentionMetadata) -> Tensor:
        """Its result lies at an address that stays."""

    def idle(self) -> AbstractContextManager[None]:
        """Inside, launches leave nothing behind: those before a capture are not steps."""


class StaticBatch:
    """The inputs of a decode step of `rows` sequences, one token each, at addresses that stay; tables for `groups`."""

    def __init__(self, rows: int, max_blocks: int, device: torch.device, groups: int = 1) -> None:
        self.rows = rows
        self.token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.meta = AttentionMetadata(
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(groups, rows, dtype=torch.int64, device=device),
            block_tables=torch.zeros(groups, rows, max_blocks, dtype=torch.int32, device=device),
            context_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
            logit_rows=torch.arange(rows, device=device),
            query_lens=(1,) * rows,
            context_lens_host=(0,) * rows,
        )

    def fill(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        """Take a batch of at most `rows` sequences; the other rows read nothing and write into the null block."""
        count, width, own = len(token_ids), meta.block_tables.shape[2], self.meta
        for target, source in (
            (self.token_ids, token_ids),
            (own.positions, meta.positions),
            (own.context_lens, meta.context_lens),
        ):
            target[:count].copy_(source)
            target[count:].zero_()
        own.slot_mapping[:, :count].copy_(meta.slot_mapping)
        own.slot_mapping[:, count:].zero_()
        own.block_tables[:, :count, :width].copy_(meta.block_tables)


Outputs = tuple[Tensor, Tensor, Tensor | None]


@dataclass(slots=True)
class _Captured:
    batch: StaticBatch
    graph: torch.cuda.CUDAGraph | None
    states: FixedStates | None = None
    outputs: Outputs | None = None


class DecodeGraphs:
    """Runs decode steps of a model whose layers read nothing back to the host."""

    def __init__(self, model: DecoderModel, cache: KVCache, max_seq_len: int) -> None:
        self._model, self._cache = model, cache
        self._max_blocks = -(-max_seq_len // cache.spec.block_size)
        self._batches: dict[int, StaticBatch] = {}
        self._captured: dict[Hashable, _Captured] = {}
        # One after the other, they may all use the same memory for what no one reads after a step.
        self._memory = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    def fits(self, meta: AttentionMetadata) -> bool:
        """Whether a step is one token each, of not too many sequences."""
        return max(meta.query_lens) == 1 and len(meta.query_lens) <= BUCKETS[-1]

    @torch.inference_mode()
    def run(
        self,
        token_ids: Tensor,
        meta: AttentionMetadata,
        tail: GraphTail | None = None,
        states: SSMStatePool | None = None,
    ) -> Outputs:
        """Hidden states [T, hidden], logits float32 [T, vocab] and the tail's result, valid until the next call.

        `states` holds the recurrent states of a model that has such, moved on by the step."""
        count = len(token_ids)
        batch, fixed = self._filled(token_ids, meta), self._fixed(meta, states)
        key = (batch.rows, tail.variant if tail is not None else None)
        kept = self._captured.get(key)
        if kept is None:
            kept = self._captured[key] = self._capture(batch, tail, fixed)
        if states is not None and kept.states is not None:
            kept.states.load(states, meta.state_slots)  # only now: runs before a capture moved them on
        if kept.graph is not None:
            kept.graph.replay()
        else:
            kept.outputs = self._step(batch, tail, kept.states)
        if states is not None and kept.states is not None:
            kept.states.save(states, meta.state_slots)
        assert kept.outputs is not None
        hidden, logits, drawn = kept.outputs
        return hidden[:count], logits[:count], drawn[:count] if drawn is not None else None

    def _filled(self, token_ids: Tensor, meta: AttentionMetadata) -> StaticBatch:
        rows = padded_rows(len(token_ids))
        if rows not in self._batches:
            self._batches[rows] = StaticBatch(rows, self._max_blocks, self._model.device, len(meta.block_tables))
        self._batches[rows].fill(token_ids, meta)
        return self._batches[rows]

    def _fixed(self, meta: AttentionMetadata, states: SSMStatePool | None) -> FixedStates | None:
        """States of as many rows; graphs whose states lie elsewhere by now are gone."""
        if states is None:
            return None
        fixed = states.fixed(padded_rows(len(meta.query_lens)))
        address = fixed.batch.ssm.data_ptr()
        if any(one.states is None or one.states.batch.ssm.data_ptr() != address for one in self._captured.values()):
            self._captured.clear()
        return fixed

    def _step(self, batch: StaticBatch, tail: GraphTail | None, states: FixedStates | None) -> Outputs:
        hidden = self._model.hidden_states(batch.token_ids, self._cache, batch.meta, states)
        logits = self._model.head(hidden)
        return hidden, logits, tail.launch(hidden, logits, batch.meta) if tail is not None else None

    def _capture(self, batch: StaticBatch, tail: GraphTail | None, states: FixedStates | None) -> _Captured:
        """Storing K and V again, as each run does, changes nothing: the batch is that of the step to come."""
        device = self._model.device
        if device.type != "cuda":
            return _Captured(batch, None, states)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._warm_up(batch, tail, states)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may look at the card's memory meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            outputs = self._step(batch, tail, states)
        return _Captured(batch, graph, states, outputs)

    def _warm_up(self, batch: StaticBatch, tail: GraphTail | None, states: FixedStates | None) -> None:
        with tail.idle() if tail is not None else nullcontext():
            for _ in range(WARM_UPS):
                self._step(batch, tail, states)
