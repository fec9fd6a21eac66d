"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from engine.models.architecture import Architecture

QWEN2 = Architecture(name="qwen2", model_types=("qwen2",), gguf_names=("qwen2",), qkv_bias=True)
