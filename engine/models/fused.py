"""Decoders of attention and MLP as one call through all layers, where the weight format has kernels for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from engine.models.attention import Attention
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderWeights
from engine.models.layers import BlockEmbedding, WeightFormat

if TYPE_CHECKING:
    from kernels.cpu.step import FusedLayers
    from kernels.gpu.step import TritonLayers

    Fused = TritonLayers | FusedLayers


def triton_layers(config: ModelConfig, weights: DecoderWeights) -> TritonLayers:
    """The layers of a model in planes, for steps of any size."""
    from kernels.gpu import step as gpu_step
    from kernels.gpu.linear import PlaneLinear

    layers = []
    for layer in weights.layers:
        qkv, o, gate_up, down = (linear for linear in layer.linears if isinstance(linear, PlaneLinear))
        norms = _norms(layer)
        assert isinstance(layer.mixer, Attention) and layer.mlp is not None
        posts = (layer.post_norm, layer.mlp.post_norm)
        layers.append(gpu_step.LayerParts(qkv, o, gate_up, down, *norms, *posts, layer.mixer.rope))
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
    ropes = tuple((rope.inv_freq, rope.scale) for rope in weights.ropes)
    heads = gpu_step.Heads(*sizes, ropes, config.attention_scale)
    activation = "gelu" if config.activation == "gelu_tanh" else "silu"
    return gpu_step.TritonLayers(layers, weights.norm, heads, config.rms_norm_eps, activation)


def cpu_layers(config: ModelConfig, weights: DecoderWeights) -> FusedLayers:
    """The layers of a model in blocks as one call for steps of few tokens."""
    from kernels.cpu import step as cpu_step

    layers = []
    for layer in weights.layers:
        qkv, o, gate_up, down = (linear for linear in layer.linears if isinstance(linear, cpu_step.BlockLinear))
        norms = _norms(layer)
        layers.append(cpu_step.LayerParts(qkv, o, gate_up, down, *norms))
    embedding, head = weights.embedding, weights.head
    own_rows = embedding.matrix if isinstance(embedding, BlockEmbedding) and config.embedding_scale == 1.0 else None
    return cpu_step.FusedLayers(
        layers,
        weights.norm,
        weights.ropes[0].inv_freq,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        eps=config.rms_norm_eps,
        rope_scale=weights.ropes[0].scale,
        scale=config.attention_scale,
        embedding=own_rows,
        head=head if isinstance(head, cpu_step.BlockLinear) and len(head.parts) == 1 else None,
    )


def fused_layers(config: ModelConfig, weights: DecoderWeights, fmt: WeightFormat) -> Fused | None:
    """The layers as kernels of the weight format take them; None where they are run operation by operation, as layers
    with a recurrence and those of several streams always are, and, on a CPU, those with another activation, norms after
    their parts or several ropes."""
    if config.ssm_layers or config.altup is not None:
        return None
    if fmt.planes:
        return triton_layers(config, weights)
    plain = config.activation == "silu" and all(layer.post_norm is None for layer in weights.layers)
    return cpu_layers(config, weights) if fmt.blocks and plain and len(weights.ropes) == 1 else None


def _norms(layer: DecoderLayer) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Those before attention and MLP, and those of queries and keys."""
    assert isinstance(layer.mixer, Attention) and layer.mlp is not None
    return layer.mixer_norm, layer.mlp.norm, layer.mixer.q_norm, layer.mixer.k_norm
