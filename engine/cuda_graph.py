"""Decode steps as CUDA graphs: one per batch-size bucket, captured when it is first needed, then replayed.

A graph repeats the very launches that were captured, with the same addresses and the same Python numbers. So what
changes from step to step lies in tensors that stay (`StaticBatch`), rows up to the bucket's size are padded with the
null block, and the pool may grow because kernels find its extents through a table on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.models.registry import DecoderModel

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
WARM_UPS = 2
"""Runs before a capture: kernels are compiled and workspaces allocated outside the graph."""


class StaticBatch:
    """The inputs of a decode step of `rows` sequences, one token each, at addresses that stay."""

    def __init__(self, rows: int, max_blocks: int, device: torch.device) -> None:
        self.rows = rows
        self.token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.meta = AttentionMetadata(
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(rows, dtype=torch.int64, device=device),
            block_tables=torch.zeros(rows, max_blocks, dtype=torch.int32, device=device),
            context_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
            logit_rows=torch.arange(rows, device=device),
            query_lens=(1,) * rows,
            context_lens_host=(0,) * rows,
        )

    def fill(self, token_ids: Tensor, meta: AttentionMetadata) -> None:
        """Take a batch of at most `rows` sequences; the other rows read nothing and write into the null block."""
        count, width, own = len(token_ids), meta.block_tables.shape[1], self.meta
        for target, source in (
            (self.token_ids, token_ids),
            (own.positions, meta.positions),
            (own.slot_mapping, meta.slot_mapping),
            (own.context_lens, meta.context_lens),
        ):
            target[:count].copy_(source)
            target[count:].zero_()
        own.block_tables[:count, :width].copy_(meta.block_tables)


@dataclass(slots=True)
class _Captured:
    batch: StaticBatch
    hidden: Tensor
    logits: Tensor
    graph: torch.cuda.CUDAGraph | None


class DecodeGraphs:
    """Runs decode steps of a model whose layers read nothing back to the host."""

    def __init__(self, model: DecoderModel, cache: KVCache, max_seq_len: int) -> None:
        self._model, self._cache = model, cache
        self._max_blocks = -(-max_seq_len // cache.spec.block_size)
        self._captured: dict[int, _Captured] = {}

    def fits(self, meta: AttentionMetadata) -> bool:
        """Whether a step is one token each, of not too many sequences."""
        return max(meta.query_lens) == 1 and len(meta.query_lens) <= BUCKETS[-1]

    @torch.inference_mode()
    def run(self, token_ids: Tensor, meta: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Hidden states [T, hidden] and logits float32 [T, vocab], valid until the next call."""
        count = len(token_ids)
        rows = next(size for size in BUCKETS if size >= count)
        kept = self._captured.get(rows)
        if kept is None:
            batch = StaticBatch(rows, self._max_blocks, self._model.device)
            batch.fill(token_ids, meta)
            kept = self._captured[rows] = self._capture(batch)
        else:
            kept.batch.fill(token_ids, meta)
        if kept.graph is not None:
            kept.graph.replay()
        else:
            kept.hidden, kept.logits = self._step(kept.batch)
        return kept.hidden[:count], kept.logits[:count]

    def _step(self, batch: StaticBatch) -> tuple[Tensor, Tensor]:
        hidden = self._model.hidden_states(batch.token_ids, self._cache, batch.meta)
        return hidden, self._model.head(hidden)

    def _capture(self, batch: StaticBatch) -> _Captured:
        """Storing K and V again, as each run does, changes nothing: the batch is that of the step to come."""
        if self._model.device.type != "cuda":
            return _Captured(batch, *self._step(batch), None)
        side = torch.cuda.Stream(self._model.device)
        side.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step(batch)
        torch.cuda.current_stream(self._model.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may look at the card's memory meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            hidden, logits = self._step(batch)
        return _Captured(batch, hidden, logits, graph)
