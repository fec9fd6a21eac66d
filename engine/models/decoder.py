"""The decoder: embedding, layers of a mixer and a gated MLP, final norm, head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.kv_cache.ssm_state import SSMStatePool, SSMStateSpec
from engine.models.attention import Attention, StepContext
from engine.models.config import ModelConfig
from engine.models.layers import Embedding, Linear, WeightFormat
from engine.models.recurrence import Recurrence, state_spec
from kernels.dispatch import Operations

if TYPE_CHECKING:
    from engine.models.fused import Fused


Mixer = Attention | Recurrence


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """norm float [hidden]; `gate_up` yields gate, then up."""

    norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """What mixes tokens, with the norm before it (float [hidden]), and the MLP where the architecture has one."""

    mixer_norm: Tensor
    mixer: Mixer
    mlp: GatedMLP | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.mixer.linears + (() if self.mlp is None else (self.mlp.gate_up, self.mlp.down))

    @property
    def nbytes(self) -> int:
        own = self.mixer_norm.nbytes + self.mixer.nbytes
        mlp = self.mlp
        return own if mlp is None else own + mlp.norm.nbytes + mlp.gate_up.nbytes + mlp.down.nbytes


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a model. `rope_scale` multiplies cos and sin of the rotary embedding."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear
    inv_freq: Tensor
    rope_scale: float
    tied_in_memory: bool

    @property
    def nbytes(self) -> int:
        """Bytes held; a matrix that embedding and head share counts once."""
        shared = 0 if self.tied_in_memory else self.embedding.nbytes
        return shared + self.head.nbytes + self.norm.nbytes + sum(layer.nbytes for layer in self.layers)

    def block_formats(self) -> str:
        """What matrices in blocks are kept in, the formats that take most bytes first; empty if there are none."""
        sizes: Counter[str] = Counter()
        linears = [linear for layer in self.layers for linear in layer.linears]
        for linear in (*linears, self.head):
            for name, nbytes in linear.formats:
                sizes[name] += nbytes
        return ", ".join(name for name, _ in sizes.most_common())


class StepAbandoned(Exception):
    """Nobody wants the result of the step any more; what it stored lies past every `cache_pos`."""


class DecoderModel:
    """A loaded model. `dtype` is what it computes in, `weight_format` what its matrices are kept in."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        fmt: WeightFormat,
        device: torch.device,
        operations: Operations,
        warnings: tuple[str, ...] = (),
        fused: Fused | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = fmt.compute_dtype
        self.weight_format = weights.block_formats() or fmt.name
        self.weight_bytes = weights.nbytes
        self.warnings = warnings
        self.weights = weights
        self._operations = operations
        self.replaced_kernels: tuple[str, ...] = ()
        self._runs_triton = fmt.planes
        self._fused = fused

    @property
    def state_spec(self) -> SSMStateSpec | None:
        """Shape of one sequence's recurrent state; None for a model that has none."""
        return state_spec(self.config, self.dtype)

    @property
    def stays_on_device(self) -> bool:
        """Whether a decode step reads nothing back to the host, so that a CUDA graph can hold it.

        The definitions in torch, which stand in for kernels that a card gets wrong, do.
        """
        replaced = set(self.replaced_kernels) - {"sample"}
        return self._fused is not None and self.device.type == "cuda" and not replaced

    @property
    def samples_on_device(self) -> bool:
        """Whether the kernel that draws tokens runs where the logits are."""
        return self._runs_triton and "sample" not in self.replaced_kernels

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, cache: KVCache, meta: AttentionMetadata, states: SSMStatePool | None = None
    ) -> Tensor:
        """Run int64 token_ids [T], storing their K and V; logits float32 [N, vocab] of `meta.logit_rows`."""
        return self.head(self.hidden_states(token_ids, cache, meta, states)[meta.logit_rows])

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        states: SSMStatePool | None = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """As `forward`, but the last layer's output after the final norm, [T, hidden], for every token.

        `states` holds the recurrent states of a model that has such, moved on by the step. Where layers run one by one,
        raises `StepAbandoned` as soon as `abandoned()` is true between two of them.
        """
        ops, config, weights = self._operations, self.config, self.weights
        if self._fused is not None and self._fused.fits(len(token_ids)):
            return self._fused(weights.embedding(token_ids), cache, meta)
        step = self._step_context(cache, meta, states)
        x = weights.embedding(token_ids)
        for layer in weights.layers:
            if abandoned():
                raise StepAbandoned
            x += layer.mixer(ops.rms_norm(x, layer.mixer_norm, config.rms_norm_eps), step, config, ops)
            if layer.mlp is not None:
                normed = ops.rms_norm(x, layer.mlp.norm, config.rms_norm_eps)
                x += layer.mlp.down(ops.swiglu(layer.mlp.gate_up(normed)))
        if states is not None and step.states is not None:
            states.put_back(step.states)
        return ops.rms_norm(x, weights.norm, config.rms_norm_eps)

    def _step_context(self, cache: KVCache, meta: AttentionMetadata, states: SSMStatePool | None) -> StepContext:
        ops, config, weights = self._operations, self.config, self.weights
        plan = None
        if config.num_attention_layers:
            plan = ops.plan_attention(meta, cache, config.num_heads, config.head_dim, self.dtype)
        cos, sin = ops.rotary_tables(meta.positions, weights.inv_freq, weights.rope_scale, self.dtype)
        batch = states.take(meta.state_slots) if states is not None else None
        return StepContext(plan, cos, sin, batch, meta.cu_seqlens_q, max(meta.query_lens) == 1)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] after the final norm -> logits float32 [N, vocab]."""
        return self.weights.head(hidden).float()
