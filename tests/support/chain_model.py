"""A model whose K and V at a position are a hash of all tokens up to it: what a block holds follows from its ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache

PRIME = 65_521
"""Below 2**24: float32 holds every value exactly."""


def chain(token_ids: Sequence[int]) -> list[float]:
    """The value at each position."""
    values, value = [], 0
    for token_id in token_ids:
        value = (31 * value + 7 * token_id + 1) % PRIME
        values.append(float(value))
    return values


class ChainModel:
    """What `ModelRunner` needs of a model. Each value is computed from the one before it as it lies in the cache."""

    stays_on_device = samples_on_device = False
    device = torch.device("cpu")

    def hidden_states(self, token_ids: Tensor, cache: KVCache, meta: AttentionMetadata, *_: object) -> Tensor:
        tokens = iter(token_ids.tolist())
        for row, count in enumerate(meta.query_lens):
            table, end = meta.block_tables[0, row].tolist(), meta.context_lens_host[row]
            for position in range(end - count, end):
                before = float(cache.read([table], 0, 0, "k", position - 1, 1)[0, 0]) if position else 0.0
                block_id, slot = table[position // cache.spec.block_size], position % cache.spec.block_size
                extent, index = divmod(block_id, cache.blocks_per_extent)
                cache.extents[extent][index, :, :, slot] = (31 * before + 7 * next(tokens) + 1) % PRIME
        return torch.zeros(len(token_ids), 1)

    def head(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), 3)
