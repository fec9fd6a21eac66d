"""What tells one Llama-type architecture from another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """`model_types` are its names in config.json, `gguf_names` in GGUF files; the flags say which tensors it must have.

    Biases that a file holds beyond these are used too.
    """

    name: str
    model_types: tuple[str, ...]
    gguf_names: tuple[str, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
