"""Gemma 3's text model: most layers see a window, with a rotary base of their own; norms before and after each part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ModelFileError
from engine.models.architecture import Architecture
from engine.models.config import ModelConfig, RopeConfig, config_from_gguf, config_from_json, number, rope_from_json
from engine.models.windows import GLOBAL, LOCAL

PATTERN = 6
"""Of so many layers the last sees everything, where the file does not say."""
GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4
LARGEST_LAYERS = 62
"""Of the 27B model, whose queries are scaled by hidden size over heads; GGUF files do not say so."""


def config_from_gemma3(values: Mapping[str, Any]) -> ModelConfig:
    """From the `config.json` of a `Gemma3ForCausalLM`. Raises `ModelFileError`."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if values.get(name):
            raise ModelFileError(f"Gemma models with {name} are not supported.")
    layers, head_dim = int(number(values, "num_hidden_layers")), int(number(values, "head_dim", 256))
    pattern = int(number(values, "sliding_window_pattern", PATTERN))
    kinds = [GLOBAL if (i + 1) % pattern == 0 else LOCAL for i in range(layers)]
    whole, local = _rotary_settings(values)
    others = {name: value for name, value in values.items() if name not in ("rope_scaling", "rope_theta")}
    base = config_from_json(
        {
            "hidden_act": values.get("hidden_activation", "gelu_pytorch_tanh"),
            "tie_word_embeddings": True,
            "layer_types": kinds,
            "max_position_embeddings": 131072,
            "head_dim": head_dim,
            **others,
            "rope_parameters": whole,
        }
    )
    return replace(
        base,
        local_rope=rope_from_json({"rope_parameters": local}, base.max_position_embeddings, 1.0),
        query_scale=float(number(values, "query_pre_attn_scalar", head_dim)) ** -0.5,
        embedding_scale=base.hidden_size**0.5,
    )


def _rotary_settings(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of layers that see everything, and of local ones; scaling concerns the former."""
    parameters = values.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return dict(parameters.get(GLOBAL) or {"rope_theta": GLOBAL_BASE}), dict(parameters.get(LOCAL) or {})
    theta = values.get("rope_theta") or GLOBAL_BASE
    whole = {"rope_theta": theta, **(values.get("rope_scaling") or {}), **parameters}
    return whole, {"rope_theta": values.get("rope_local_base_freq") or LOCAL_BASE}


def gemma3_from_gguf(metadata: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """From the metadata of a GGUF file of architecture "gemma3"."""
    base = config_from_gguf(metadata, vocab_size)
    pattern = metadata.get("gemma3.attention.sliding_window_pattern", PATTERN)
    if isinstance(pattern, int):
        local = [(i + 1) % pattern != 0 for i in range(base.num_layers)]
    else:
        local = [bool(one) for one in pattern]
    scaled = base.num_layers == LARGEST_LAYERS
    return replace(
        base,
        global_layers=tuple(i for i, one in enumerate(local) if not one),
        local_rope=RopeConfig(base=float(metadata.get("gemma3.rope.freq_base_swa") or LOCAL_BASE)),
        query_scale=(base.hidden_size / base.num_heads if scaled else base.head_dim) ** -0.5,
        embedding_scale=base.hidden_size**0.5,
        activation="gelu_tanh",
    )


GEMMA3 = Architecture(
    name="gemma3",
    model_types=("gemma3_text",),
    gguf_names=("gemma3",),
    qk_norm=True,
    post_norms=True,
    norm_offset=1.0,
    read_json=config_from_gemma3,
    read_gguf=gemma3_from_gguf,
)
