"""Runs token ids again on a cache of its own, beside the live one: for comparisons that must not touch any session."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import build_metadata
from engine.jobs import Slices, run_through
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache import KVCache
from engine.kv_cache.checkpoints import StateCheckpoints
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.spec import KVCacheSpec
from engine.kv_cache.ssm_state import SSMStatePool
from engine.models.registry import DecoderModel
from engine.scheduler import ScheduledBatch, ScheduledItem
from engine.sequence import Sequence
from kernels.layer_groups import LayerGroup

REPLAY_CHUNK = 256
"""Tokens of one step where nobody waits."""
STATE_SLOTS = 4
"""Of a recurrent state: the null slot, the live one, and what the sequence keeps on its way."""


def scratch_blocks(spec: KVCacheSpec, tokens: int) -> int:
    """Blocks of a replay's cache."""
    return max(spec.windows.blocks(tokens, REPLAY_CHUNK), 1) + 1


def branch_blocks(spec: KVCacheSpec, tokens: int) -> int:
    """Blocks of a branch's own: what it shares ends within a block, which it copies."""
    return len(spec.groups) * (-(-tokens // spec.block_size) + 1)


class Replay:
    """One sequence of at most `max_tokens`; its K and V are kept as `spec` says, with `keep_all` also those that
    windows have passed. It may part into `branches` that each go on for `branch_tokens`."""

    def __init__(
        self,
        model: DecoderModel,
        spec: KVCacheSpec,
        max_tokens: int,
        balance: Tensor | None = None,
        keep_all: bool = False,
        branches: int = 0,
        branch_tokens: int = 0,
    ) -> None:
        groups = (LayerGroup(),) * len(spec.groups) if keep_all else spec.groups
        blocks = scratch_blocks(replace(spec, groups=groups), max_tokens) + branches * branch_blocks(
            spec, branch_tokens
        )
        self.model = model
        self.cache = KVCache(spec, model.device, extent_bytes=blocks * spec.block_bytes, max_blocks=blocks)
        self.cache.balance = balance
        self.cache.grow(blocks)
        self._slots = BlockPool(STATE_SLOTS * (1 + branches))
        self._states, checkpoints = None, None
        if model.state_spec is not None:
            self._states, checkpoints = SSMStatePool(model.state_spec, model.device), StateCheckpoints(self._slots)
        self._pool = BlockPool(blocks)
        prefixes = PrefixCache(self._pool, spec.block_size, checkpoints, spec.num_layers > 0, groups)
        self.sequence = Sequence(prefixes)

    def state(self) -> dict[str, Tensor] | None:
        """The recurrent state behind the last id that was run, as `SSMStatePool.export_state`; None without one."""
        live = self.sequence.state.live if self.sequence.state is not None else None
        return self._states.export_state(live) if self._states is not None and live is not None else None

    def extend(self, token_ids: SequenceOf[int], logits: int = 1) -> Tensor:
        """Run more ids; float32 logits [n, V] of the last `logits` of them."""
        return run_through(self.slices(token_ids, logits, REPLAY_CHUNK))

    def slices(self, token_ids: SequenceOf[int], logits: int, chunk: int) -> Slices[Tensor]:
        """As `extend`, pausing after each `chunk` tokens."""
        sequence, parts = self.sequence, []
        end = len(sequence.token_ids) + len(token_ids)
        sequence.set_tokens([*sequence.token_ids, *token_ids])
        sequence.reserve(end, min(end, sequence.cache_pos + chunk))
        if self._states is not None:
            self._states.copy(self._slots.take_copies())
        while sequence.remaining:
            count = min(sequence.remaining, chunk)
            sequence.reserve(end, sequence.cache_pos + count)
            item = ScheduledItem(sequence, sequence.cache_pos, count, wants_logits=True)
            ids, meta = build_metadata(ScheduledBatch((item,)), self.cache.spec.block_size, self.model.device)
            first = max(0, end - logits - item.start)
            rows = torch.arange(min(first, count), count, device=self.model.device)
            hidden = self.model.hidden_states(ids, self.cache, meta, self._states)
            parts.append(self.model.head(hidden[rows]))
            sequence.advance(count)
            if sequence.remaining:
                yield
        return torch.cat(parts)

    def branch(self, count: int) -> list[Sequence]:
        """So many sequences that share what was run, and go on from there by `step`."""
        return [self.sequence.fork(None, self.sequence.cache_pos) for _ in range(count)]

    def step(self, sequences: SequenceOf[Sequence], token_ids: SequenceOf[int]) -> Tensor:
        """Run one more id of each branch at a time; float32 logits [n, V]."""
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.token_ids.append(token_id)
            sequence.reserve(len(sequence.token_ids))
        if self.cache.spec.num_layers:
            self.cache.copy_blocks(self._pool.take_copies())
        if self._states is not None:
            self._states.copy(self._slots.take_copies())
        items = tuple(ScheduledItem(sequence, sequence.cache_pos, 1, wants_logits=True) for sequence in sequences)
        ids, meta = build_metadata(ScheduledBatch(items), self.cache.spec.block_size, self.model.device)
        logits = self.model.head(self.model.hidden_states(ids, self.cache, meta, self._states))
        for sequence in sequences:
            sequence.advance(1)
        return logits
