"""Qwen3: queries and keys are normed head by head before they are rotated."""

from engine.models.architecture import Architecture

QWEN3 = Architecture(name="qwen3", model_types=("qwen3",), gguf_names=("qwen3",), qk_norm=True)
