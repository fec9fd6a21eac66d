"""Mamba-2: layers of nothing but the recurrence (Dao and Gu, "Transformers are SSMs", 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import ModelFileError
from engine.models.architecture import Architecture
from engine.models.config import ModelConfig, RopeConfig, SSMConfig, check_activation, number

MAX_CONTEXT = 2**20
"""A recurrence has no length that it can't go past; histories and panel want some bound."""


def config_from_mamba2(values: Mapping[str, Any]) -> ModelConfig:
    """From the `config.json` of a `Mamba2ForCausalLM`. Raises `ModelFileError`."""
    check_activation(values, ("silu", "swish"))
    layers = int(number(values, "num_hidden_layers"))
    return ModelConfig(
        model_type="mamba2",
        num_layers=layers,
        hidden_size=int(number(values, "hidden_size")),
        intermediate_size=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        vocab_size=int(number(values, "vocab_size")),
        max_position_embeddings=MAX_CONTEXT,
        rms_norm_eps=float(number(values, "layer_norm_epsilon", 1e-5)),
        rope=RopeConfig(),
        tied=values.get("tie_word_embeddings"),
        ssm=SSMConfig(
            num_heads=int(number(values, "num_heads")),
            head_dim=int(number(values, "head_dim")),
            state_size=int(number(values, "state_size")),
            num_groups=int(number(values, "n_groups", 8)),
            conv_width=int(number(values, "conv_kernel", 4)),
            **time_step_limits(values),
        ),
        ssm_layers=tuple(range(layers)),
    )


def time_step_limits(values: Mapping[str, Any]) -> dict[str, float]:
    """`dt_min` and `dt_max`; files write infinity as a JSON extension or as `{"__float__": "Infinity"}`."""
    limits = values.get("time_step_limit") or (0.0, math.inf)
    try:
        low, high = (float(v["__float__"]) if isinstance(v, Mapping) else float(v) for v in limits)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelFileError("The model's configuration has no usable time_step_limit.") from error
    return {"dt_min": low, "dt_max": high}


MAMBA2 = Architecture(name="mamba2", model_types=("mamba2",), mlp=False, read_json=config_from_mamba2)
