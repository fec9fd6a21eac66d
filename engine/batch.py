"""What one step runs: the scheduler's choice (`ScheduledBatch`) and the tensors that layers and kernels see of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.scheduler import ScheduledBatch, ScheduledItem


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """All that model and kernels know of a batch of S sequences with T tokens in all, tokens of a sequence adjacent.

    Each draft, and the token before the first, counts as a sequence of its own that shares the others' blocks: layers
    store before they attend, so it sees what stands before it, and it takes the same way as any decoded token.

    The cache keeps K and V of G groups of layers, each with block tables of its own (`KVCacheSpec.groups`).

    positions     int64 [T]           position of each token in its sequence
    slot_mapping  int64 [G, T]        slot (block_id * block_size + offset) that takes the token's K and V
    block_tables  int32 [G, S, blocks]  by position // block_size; the null block 0 where a group holds none
    context_lens  int32 [S]           tokens in the cache once this step's tokens are stored
    cu_seqlens_q  int32 [S + 1]       prefix sums of the sequences' token counts
    logit_rows    int64 [N]           rows of the flat batch whose logits are wanted
    query_lens, context_lens_host     the same counts on the host, for paths that loop over sequences
    state_slots                       the slot of each sequence's recurrent state, where the model has such
    """

    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    logit_rows: Tensor
    query_lens: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    state_slots: tuple[int, ...] = ()

    def to(self, device: torch.device) -> AttentionMetadata:
        """The same with its tensors on `device`."""
        return replace(
            self,
            positions=self.positions.to(device),
            slot_mapping=self.slot_mapping.to(device),
            block_tables=self.block_tables.to(device),
            context_lens=self.context_lens.to(device),
            cu_seqlens_q=self.cu_seqlens_q.to(device),
            logit_rows=self.logit_rows.to(device),
        )


def build_metadata(batch: ScheduledBatch, block_size: int, device: torch.device) -> tuple[Tensor, AttentionMetadata]:
    """Token ids int64 [T] and metadata of a scheduled batch, on `device`."""
    token_ids: list[int] = []
    positions: list[int] = []
    cu_seqlens = [0]
    logit_rows: list[int] = []
    runs = [run for item in batch.items for run in _runs(item)]
    for item in batch.items:
        token_ids += item.token_ids
    for run in runs:
        positions += range(run.start, run.end)
        cu_seqlens.append(len(positions))
        if run.item.wants_logits:
            logit_rows.append(len(positions) - 1)
    # Without K and V there are no tables, and the slots mean nothing.
    groups = range(max(1, len(batch.items[0].sequence.block_tables)))
    context_lens = tuple(run.end for run in runs)

    def tensor(values: Any, dtype: type[np.integer[Any]] = np.int64) -> Tensor:
        """By way of an array, which takes a tenth of the time at these sizes."""
        made = torch.from_numpy(np.array(values, dtype))
        return made if device.type == "cpu" else made.to(device, non_blocking=True)

    meta = AttentionMetadata(
        positions=tensor(positions),
        slot_mapping=tensor([_slots(runs, group, block_size) for group in groups]),
        block_tables=tensor([_tables(runs, group, block_size) for group in groups], np.int32),
        context_lens=tensor(context_lens, np.int32),
        cu_seqlens_q=tensor(cu_seqlens, np.int32),
        logit_rows=tensor(logit_rows),
        query_lens=tuple(run.end - run.start for run in runs),
        context_lens_host=context_lens,
        state_slots=tuple(state.live for item in batch.items if (state := item.sequence.state) and state.live),
    )
    return tensor(token_ids), meta


@dataclass(frozen=True, slots=True)
class _Run:
    """Positions that attend as one sequence."""

    item: ScheduledItem
    start: int
    end: int


def _runs(item: ScheduledItem) -> list[_Run]:
    if not item.drafts:
        return [_Run(item, item.start, item.start + item.count)]
    return [_Run(item, position, position + 1) for position in range(item.start, item.start + item.count)]


def _slots(runs: list[_Run], group: int, size: int) -> list[int]:
    """Of every token of the batch, in order."""
    slots: list[int] = []
    for run in runs:
        table, positions = _table(run.item, group), range(run.start, run.end)
        slots += [table[p // size] * size + p % size for p in positions] if table else [0] * len(positions)
    return slots


def _tables(runs: list[_Run], group: int, size: int) -> list[list[int]]:
    """Up to the last block of each sequence that is used, equally long."""
    tables = [_table(run.item, group)[: -(-run.end // size)] for run in runs]
    width = max(len(table) for table in tables)
    return [table + [0] * (width - len(table)) for table in tables]


def _table(item: ScheduledItem, group: int) -> list[int]:
    tables = item.sequence.block_tables
    return tables[group] if tables else []
