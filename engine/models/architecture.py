"""What tells one architecture from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import ModelConfig, config_from_gguf, config_from_json


@dataclass(frozen=True, slots=True)
class Architecture:
    """`model_types` are its names in config.json, `gguf_names` in GGUF files; the flags say which tensors it must have.

    Biases that a file holds beyond these are used too. `read_json` turns a config.json into sizes, `read_gguf` the
    metadata of a GGUF file and the number of tokens. `post_norms`: what attention and MLP yield is normed; `v_norm`:
    values are, by a norm without a weight.
    `norm_offset` is added to the weights of norms in safetensors files; GGUF files hold the sums.
    """

    name: str
    model_types: tuple[str, ...]
    gguf_names: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    v_norm: bool = False
    mlp: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    read_json: Callable[[Mapping[str, Any]], ModelConfig] = config_from_json
    read_gguf: Callable[[Mapping[str, Any], int], ModelConfig] = config_from_gguf
