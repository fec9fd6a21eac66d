"""Attention as the mixer of a decoder layer, over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.kv_cache.ssm_state import StateBatch
from engine.models.config import ModelConfig
from engine.models.layers import Linear
from kernels.dispatch import Operations

Tables = tuple[Tensor, Tensor]
"""cos and sign-folded sin [T, 1, rotary_dim]."""


@dataclass(frozen=True, slots=True)
class Turn:
    """How a layer rotates this step's queries and keys, and the queries for sinks, where some lie beyond a window."""

    own: Tables
    sinks: Tables | None


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share.

    For attention the kernels' plan and the turn of each layer that attends; for recurrences the sequences' states, and
    where each sequence's tokens start, int32 [S + 1]. `one_each`: every sequence has a single token.
    """

    plan: Any
    turns: Sequence[Turn]
    states: StateBatch | None
    query_starts: Tensor
    one_each: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """`qkv` yields all query heads, then key heads, then value heads; queries alone where another layer's K and V are
    used. `q_norm`, `k_norm` [head_dim] where used, and `v_norm`, which is all ones.

    `layer` counts the layers that attend, `rope` is the layer's among `DecoderWeights.ropes`.
    """

    layer: int
    rope: int
    qkv: Linear
    o: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    v_norm: Tensor | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o

    @property
    def nbytes(self) -> int:
        norms = sum(norm.nbytes for norm in (self.q_norm, self.k_norm) if norm is not None)
        return self.qkv.nbytes + self.o.nbytes + norms

    def __call__(self, x: Tensor, step: StepContext, config: ModelConfig, ops: Operations) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the tokens' K and V are stored first, so each sees itself."""
        heads = self.qkv(x).view(x.shape[0], -1, config.head_dim)
        queries, turned = heads[:, : config.num_heads], heads[:, : config.num_heads + config.num_kv_heads]
        keys, values = turned[:, config.num_heads :], heads[:, config.num_heads + config.num_kv_heads :]
        for part, norm in ((queries, self.q_norm), (keys, self.k_norm), (values, self.v_norm)):
            if norm is not None:
                part.copy_(ops.rms_norm(part, norm, config.rms_norm_eps))
        turn, sink_queries = step.turns[self.layer], None
        if turn.sinks is not None:
            sink_queries = queries.clone()
            ops.rotary(sink_queries[..., : config.rotary_dim], *turn.sinks)
        ops.rotary(turned[..., : config.rotary_dim], *turn.own)
        if config.owns_kv(self.layer):
            ops.store_kv(step.plan, self.layer, heads[:, config.num_heads :])
        return self.o(ops.attention(step.plan, self.layer, queries, config.attention_scale, sink_queries))
