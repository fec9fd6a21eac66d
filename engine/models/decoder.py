"""The Llama-type decoder: embedding, layers of attention and gated MLP, final norm, head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.models.attention import Attention, StepContext
from engine.models.config import ModelConfig
from engine.models.layers import Embedding, Linear, WeightFormat
from kernels.dispatch import Operations


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norms are float [hidden]; `gate_up` yields gate, then up."""

    attn_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    @property
    def nbytes(self) -> int:
        parts = (self.attention.qkv, self.attention.o, self.gate_up, self.down)
        return sum(part.nbytes for part in parts) + self.attn_norm.nbytes + self.mlp_norm.nbytes


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
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = fmt.compute_dtype
        self.weight_format = fmt.name
        self.weight_bytes = weights.nbytes
        self.warnings = warnings
        self.weights = weights
        self._operations = operations

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """Run int64 token_ids [T], storing their K and V; logits float32 [N, vocab] of `meta.logit_rows`."""
        return self.head(self.hidden_states(token_ids, cache, meta)[meta.logit_rows])

    @torch.inference_mode()
    def hidden_states(self, token_ids: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """As `forward`, but the last layer's output after the final norm, [T, hidden], for every token."""
        ops, config, weights = self._operations, self.config, self.weights
        cos, sin = ops.rotary_tables(meta.positions, weights.inv_freq, weights.rope_scale, self.dtype)
        step = StepContext(ops.plan_attention(meta, cache, config.num_heads, self.dtype), cos, sin)
        x = weights.embedding(token_ids)
        for layer in weights.layers:
            normed = ops.rms_norm(x, layer.attn_norm, config.rms_norm_eps)
            x += layer.attention(normed, step, config, ops)
            normed = ops.rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            x += layer.down(ops.swiglu(layer.gate_up(normed)))
        return ops.rms_norm(x, weights.norm, config.rms_norm_eps)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] after the final norm -> logits float32 [N, vocab]."""
        return self.weights.head(hidden).float()
