"""Bamba: Llama's layers, most of them with a Mamba-2 recurrence in place of attention; half of each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ModelFileError
from engine.models.architecture import Architecture
from engine.models.config import ModelConfig, SSMConfig, config_from_json, number
from engine.models.mamba2 import time_step_limits


def config_from_bamba(values: Mapping[str, Any]) -> ModelConfig:
    """From the `config.json` of a `BambaForCausalLM`. Raises `ModelFileError`."""
    base = config_from_json({"rms_norm_eps": 1e-5, **values}, partial_rotary=0.5)
    attention = values.get("attn_layer_indices") or []
    if not isinstance(attention, list) or not all(isinstance(i, int) and 0 <= i < base.num_layers for i in attention):
        raise ModelFileError("The model's configuration has no usable attn_layer_indices.")
    heads = int(number(values, "mamba_n_heads"))
    inner = int(number(values, "mamba_expand", 2)) * base.hidden_size
    head_dim = values.get("mamba_d_head", "auto")
    return replace(
        base,
        ssm=SSMConfig(
            num_heads=heads,
            head_dim=inner // max(heads, 1) if head_dim == "auto" else int(number(values, "mamba_d_head")),
            state_size=int(number(values, "mamba_d_state")),
            num_groups=int(number(values, "mamba_n_groups", 1)),
            conv_width=int(number(values, "mamba_d_conv", 4)),
            **time_step_limits(values),
        ),
        ssm_layers=tuple(i for i in range(base.num_layers) if i not in attention),
    )


BAMBA = Architecture(name="bamba", model_types=("bamba",), read_json=config_from_bamba)
