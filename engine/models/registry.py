"""From a file on disk to a model that runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelFileError
from engine.models.altup import AltUp, AltUpLayer
from engine.models.architecture import Architecture
from engine.models.attention import Attention
from engine.models.bamba import BAMBA
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderLayer, DecoderModel, DecoderWeights, GatedMLP, Mixer, Rope
from engine.models.fused import fused_layers
from engine.models.gemma3 import GEMMA3
from engine.models.gemma3n import GEMMA3N
from engine.models.layers import Embedding, Linear, PlainLinear, TableEmbedding, WeightFormat, WeightLoader, pick_format
from engine.models.llama import LLAMA
from engine.models.mamba2 import MAMBA2
from engine.models.qwen2 import QWEN2
from engine.models.qwen3 import QWEN3
from engine.models.recurrence import Recurrence
from engine.models.rope import rope_frequencies
from engine.models.shapes import check_shapes
from engine.weights.download import ProgressCallback
from engine.weights.gguf_reader import GGUFSource
from engine.weights.safetensors_reader import SafetensorsSource
from engine.weights.source import WeightSource
from kernels.dispatch import operations, triton_runs_on

__all__ = ["ARCHITECTURES", "DecoderModel", "build_model", "load_model"]

ARCHITECTURES = (LLAMA, QWEN2, QWEN3, GEMMA3, GEMMA3N, MAMBA2, BAMBA)
_LOADER_THREADS = 2


def load_model(
    path: Path,
    device: torch.device,
    dtype: str = "auto",
    *,
    progress: ProgressCallback | None = None,
    triton: bool | None = None,
) -> DecoderModel:
    """Load a `.gguf` file or a folder with safetensors. `progress` is told the layers done.

    `triton`: run the Triton kernels; None: on a CUDA card where they can be had.

    Raises `ModelFileError`, one sentence, for what can't be read or run.
    """
    source: WeightSource = GGUFSource(path) if path.is_file() else SafetensorsSource(path)
    fmt = pick_format(device, dtype, triton if triton is not None else triton_runs_on(device))
    return build_model(source, device, fmt, progress=progress)


def build_model(
    source: WeightSource,
    device: torch.device,
    fmt: WeightFormat,
    *,
    progress: ProgressCallback | None = None,
) -> DecoderModel:
    """The model of a source that is open, its matrices kept as `fmt` says; otherwise as `load_model`."""
    architecture, config = read_config(source)
    shapes = source.shapes()
    tied, warnings = _tied_head(source, config)
    check_shapes(shapes, architecture, config, tied)
    table = operations(device, fmt.planes)
    loader = WeightLoader(source, device, fmt, table)
    weights = _load_weights(loader, architecture, config, tied, progress)
    source.release()
    return DecoderModel(config, weights, fmt, device, table, warnings, fused_layers(config, weights, fmt))


def read_config(source: WeightSource) -> tuple[Architecture, ModelConfig]:
    """Which architecture a file holds, and its sizes."""
    if source.kind == "gguf":
        name = source.metadata.get("general.architecture")
        found = [a for a in ARCHITECTURES if name in a.gguf_names]
    else:
        name = source.metadata.get("model_type")
        found = [a for a in ARCHITECTURES if name in a.model_types]
    if not found:
        known = ", ".join(a.name for a in ARCHITECTURES if source.kind != "gguf" or a.gguf_names)
        elsewhere = source.kind == "gguf" and any(name in a.model_types for a in ARCHITECTURES)
        place = " in GGUF files" if elsewhere else ""
        raise ModelFileError(f"The model's architecture {str(name)!r} is not supported{place}; {known} are.")
    if source.kind == "gguf":
        return found[0], found[0].read_gguf(source.metadata, source.shapes().get("embed.weight", (0,))[0])
    return found[0], found[0].read_json(source.metadata)


def _tied_head(source: WeightSource, config: ModelConfig) -> tuple[bool, tuple[str, ...]]:
    """Whether the head is the embedding, and warnings. A GGUF head of its own counts; a tie flag goes before a head."""
    if "head.weight" not in source.shapes():
        return config.tied is not False, ()
    same = source.same("head.weight", "embed.weight") if "embed.weight" in source.shapes() else False
    if config.tied and not same:
        return True, ("The model file holds a head that differs from its tied embedding; the embedding is used.",)
    return bool(config.tied) or same, ()


def _load_weights(
    loader: WeightLoader,
    architecture: Architecture,
    config: ModelConfig,
    tied: bool,
    progress: ProgressCallback | None,
) -> DecoderWeights:
    """Layers are converted by a few threads: most of the time goes into single-threaded code that frees the GIL."""
    layers = []
    embedding = loader.embedding("embed.weight")
    with ThreadPoolExecutor(_LOADER_THREADS) as pool:
        head_job = pool.submit(_load_head, loader, embedding, tied)
        jobs = [pool.submit(_load_layer, loader, architecture, config, i) for i in range(config.num_layers)]
        for job in jobs:
            layers.append(job.result())
            if progress is not None:
                progress("Loading the model", len(layers), config.num_layers)
    head = head_job.result()
    return DecoderWeights(
        embedding=loader.in_memory(embedding, head) if tied else embedding,
        layers=tuple(layers),
        norm=_norm(loader, architecture, "norm"),
        head=head,
        ropes=_ropes(loader, config),
        tied_in_memory=tied,
        altup=_load_altup(loader, config),
    )


def _ropes(loader: WeightLoader, config: ModelConfig) -> tuple[Rope, ...]:
    divisors = loader.source.load("rope.divisors").float() if "rope.divisors" in loader.shapes else None
    found = [rope_frequencies(config.rope, config.rotary_dim, divisors)]
    if config.local_rope is not None:
        found.append(rope_frequencies(config.local_rope, config.rotary_dim))
    return tuple(Rope(inv_freq.to(loader.device), scale) for inv_freq, scale in found)


def _norm(loader: WeightLoader, architecture: Architecture, name: str) -> Tensor:
    """The weight of a norm as what it multiplies by."""
    if not architecture.norm_offset or loader.source.kind == "gguf":
        return loader.vector(f"{name}.weight")
    return (loader.vector(f"{name}.weight", torch.float32) + architecture.norm_offset).to(loader.format.compute_dtype)


def _load_head(loader: WeightLoader, embedding: Embedding, tied: bool) -> Linear:
    if tied and isinstance(embedding, TableEmbedding):
        return PlainLinear(embedding.weight, None, loader.operations)
    if tied and loader.format.planes:
        return loader.tied_head(embedding)
    return loader.linear("embed" if tied else "head")


def _load_layer(loader: WeightLoader, architecture: Architecture, config: ModelConfig, layer: int) -> DecoderLayer:
    prefix = f"layers.{layer}."
    before = sum(1 for other in config.ssm_layers if other < layer)
    mixer: Mixer
    if layer in config.ssm_layers:
        mixer = _load_recurrence(loader, config, prefix, before)
    else:
        mixer = _load_attention(loader, architecture, config, prefix, layer - before)
    mlp, post_norm = None, None
    if architecture.mlp:
        mlp = GatedMLP(
            norm=_norm(loader, architecture, prefix + "mlp_norm"),
            gate_up=loader.linear(prefix + "gate", prefix + "up"),
            down=loader.linear(prefix + "down"),
            post_norm=_norm(loader, architecture, prefix + "mlp_post_norm") if architecture.post_norms else None,
            sparsity=config.gate_sparsity[layer] if config.gate_sparsity else 0.0,
        )
    if architecture.post_norms:
        post_norm = _norm(loader, architecture, prefix + "attn_post_norm")
    altup = _load_altup_layer(loader, prefix) if config.altup is not None else None
    return DecoderLayer(_norm(loader, architecture, prefix + "attn_norm"), mixer, mlp, post_norm, altup)


def _load_attention(
    loader: WeightLoader, architecture: Architecture, config: ModelConfig, prefix: str, kv_layer: int
) -> Attention:
    own = config.owns_kv(kv_layer)
    ones = torch.ones(config.head_dim, dtype=loader.format.compute_dtype, device=loader.device)
    return Attention(
        layer=kv_layer,
        rope=1 if config.local_rope is not None and config.windows[kv_layer] is not None else 0,
        qkv=loader.linear(*(prefix + name for name in ("q", "k", "v")[: 3 if own else 1])),
        o=loader.linear(prefix + "o"),
        q_norm=_norm(loader, architecture, prefix + "q_norm") if architecture.qk_norm else None,
        k_norm=_norm(loader, architecture, prefix + "k_norm") if architecture.qk_norm and own else None,
        v_norm=ones if architecture.v_norm and own else None,
    )


def _load_altup(loader: WeightLoader, config: ModelConfig) -> AltUp | None:
    if config.altup is None:
        return None
    others = range(1, config.altup.streams)
    return AltUp(
        sizes=config.altup,
        own_embedding=loader.embedding("own_embed.weight"),
        own_projection=loader.linear("own_projection"),
        own_norm=loader.vector("own_norm.weight"),
        expand=tuple(loader.linear(f"expand.{stream - 1}") for stream in others),
        merge=tuple(loader.linear(f"merge.{stream - 1}") for stream in others),
    )


def _load_altup_layer(loader: WeightLoader, prefix: str) -> AltUpLayer:
    return AltUpLayer(
        norm=loader.vector(prefix + "altup_norm.weight"),
        router=loader.vector(prefix + "altup_router.weight"),
        predict=loader.vector(prefix + "altup_predict.weight"),
        correct=loader.vector(prefix + "altup_correct.weight"),
        scale=loader.vector(prefix + "altup_scale"),
        laurel_left=loader.linear(prefix + "laurel_left"),
        laurel_right=loader.linear(prefix + "laurel_right"),
        laurel_norm=loader.vector(prefix + "laurel_norm.weight"),
        input_gate=loader.linear(prefix + "own_gate"),
        input_projection=loader.linear(prefix + "own_out"),
        input_norm=loader.vector(prefix + "own_out_norm.weight"),
    )


def _load_recurrence(loader: WeightLoader, config: ModelConfig, prefix: str, state_layer: int) -> Recurrence:
    assert config.ssm is not None
    bias = prefix + "conv.bias"
    return Recurrence(
        layer=state_layer,
        sizes=config.ssm,
        in_proj=loader.linear(prefix + "in_proj"),
        out_proj=loader.linear(prefix + "out_proj"),
        conv_weight=loader.vector(prefix + "conv.weight").squeeze(1),
        conv_bias=loader.vector(bias) if bias in loader.shapes else None,
        A=-loader.vector(prefix + "a_log", torch.float32).exp(),
        D=loader.vector(prefix + "d", torch.float32),
        dt_bias=loader.vector(prefix + "dt_bias", torch.float32),
        norm=loader.vector(prefix + "ssm_norm.weight"),
    )
