"""A model whose K and V at a position are a hash of all tokens up to it, and so is its recurrent state if it has one:
what a block or a slot holds follows from its ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.kv_cache.ssm_state import SSMStatePool, SSMStateSpec

PRIME = 65_521
"""Below 2**24: float32 holds every value exactly."""
STATE = SSMStateSpec(num_layers=1, conv_shape=(1, 1), ssm_shape=(1, 1, 1), conv_dtype=torch.float32)
"""The last value, and the last token as the convolution's input."""


def chain(token_ids: Sequence[int]) -> list[float]:
    """The value at each position."""
    values, value = [], 0
    for token_id in token_ids:
        value = (31 * value + 7 * token_id + 1) % PRIME
        values.append(float(value))
    return values


class ChainModel:
    """What `ModelRunner` needs of a model. Each value is computed from the one before it as it lies in the cache, or in
    the recurrent state where there is one."""

    stays_on_device = samples_on_device = False
    device = torch.device("cpu")

    def hidden_states(
        self, token_ids: Tensor, cache: KVCache, meta: AttentionMetadata, states: SSMStatePool | None, *_: object
    ) -> Tensor:
        batch = states.take(meta.state_slots, apart=max(meta.query_lens) > 1) if states is not None else None
        tokens = iter(token_ids.tolist())
        for row, count in enumerate(meta.query_lens):
            table, end = meta.block_tables[0, row].tolist(), meta.context_lens_host[row]
            for position in range(end - count, end):
                token = next(tokens)
                if batch is not None:
                    before = float(batch.ssm[0, row, 0, 0, 0])
                else:
                    before = float(cache.read([table], 0, 0, "k", position - 1, 1)[0, 0]) if position else 0.0
                value = (31 * before + 7 * token + 1) % PRIME
                if batch is not None:
                    batch.ssm[0, row], batch.conv[0, row] = value, token
                if cache.spec.num_layers:
                    block_id, slot = table[position // cache.spec.block_size], position % cache.spec.block_size
                    extent, index = divmod(block_id, cache.blocks_per_extent)
                    cache.extents[extent][index, :, :, slot] = value
        if states is not None and batch is not None:
            states.put_back(batch)
        return torch.zeros(len(token_ids), 1)

    def step(
        self, token_ids: Tensor, cache: KVCache, meta: AttentionMetadata, states: SSMStatePool | None, *_: object
    ) -> tuple[Tensor, Tensor]:
        hidden = self.hidden_states(token_ids, cache, meta, states)
        return hidden, self.head(hidden[meta.logit_rows])

    def head(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), 3)
