"""The Llama-type decoder: embedding, layers of attention and gated MLP, final norm, head."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.models.attention import Attention, StepContext
from engine.models.config import ModelConfig
from engine.models.layers import Embedding, Linear, WeightFormat
from kernels.dispatch import Operations

if TYPE_CHECKING:
    from kernels.cpu.step import FusedLayers
    from kernels.gpu.step import TritonLayers


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norms are float [hidden]; `gate_up` yields gate, then up."""

    attn_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.attention.qkv, self.attention.o, self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears) + self.attn_norm.nbytes + self.mlp_norm.nbytes


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


def triton_layers(config: ModelConfig, weights: DecoderWeights) -> TritonLayers:
    """The layers of a model in planes, for steps of any size."""
    from kernels.gpu import step as gpu_step
    from kernels.gpu.linear import PlaneLinear

    layers = []
    for layer in weights.layers:
        qkv, o, gate_up, down = (linear for linear in layer.linears if isinstance(linear, PlaneLinear))
        norms = (layer.attn_norm, layer.mlp_norm, layer.attention.q_norm, layer.attention.k_norm)
        layers.append(gpu_step.LayerParts(qkv, o, gate_up, down, *norms))
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
    heads = gpu_step.Heads(*sizes, weights.inv_freq, weights.rope_scale)
    return gpu_step.TritonLayers(layers, weights.norm, heads, config.rms_norm_eps)


def cpu_layers(config: ModelConfig, weights: DecoderWeights) -> FusedLayers:
    """The layers of a model in blocks as one call for steps of few tokens."""
    from kernels.cpu import step as cpu_step

    layers = []
    for layer in weights.layers:
        qkv, o, gate_up, down = (linear for linear in layer.linears if isinstance(linear, cpu_step.BlockLinear))
        norms = (layer.attn_norm, layer.mlp_norm, layer.attention.q_norm, layer.attention.k_norm)
        layers.append(cpu_step.LayerParts(qkv, o, gate_up, down, *norms))
    return cpu_step.FusedLayers(
        layers,
        weights.norm,
        weights.inv_freq,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        eps=config.rms_norm_eps,
        rope_scale=weights.rope_scale,
    )


def fused_layers(config: ModelConfig, weights: DecoderWeights, fmt: WeightFormat) -> TritonLayers | FusedLayers | None:
    """The layers as kernels of the weight format take them; None where they are run operation by operation."""
    if fmt.planes:
        return triton_layers(config, weights)
    return cpu_layers(config, weights) if fmt.blocks else None


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
        self.weight_format = weights.block_formats() or fmt.name
        self.weight_bytes = weights.nbytes
        self.warnings = warnings
        self.weights = weights
        self._operations = operations
        self.replaced_kernels: tuple[str, ...] = ()
        self._runs_triton = fmt.planes
        self._fused = fused_layers(config, weights, fmt)

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
    def forward(self, token_ids: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """Run int64 token_ids [T], storing their K and V; logits float32 [N, vocab] of `meta.logit_rows`."""
        return self.head(self.hidden_states(token_ids, cache, meta)[meta.logit_rows])

    @torch.inference_mode()
    def hidden_states(self, token_ids: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """As `forward`, but the last layer's output after the final norm, [T, hidden], for every token."""
        ops, config, weights = self._operations, self.config, self.weights
        if self._fused is not None and self._fused.fits(len(token_ids)):
            return self._fused(weights.embedding(token_ids), cache, meta)
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
