"""Llama, and what has its shape: SmolLM, Mistral without a window."""

from engine.models.architecture import Architecture

LLAMA = Architecture(name="llama", model_types=("llama", "mistral"), gguf_names=("llama",))
