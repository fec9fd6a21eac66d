"""Models of real shapes with random weights: nothing is fetched, and nothing but memory limits their size."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.roofline import MODELS, Shape, layer_matrices, weight_kind
from engine.models.layers import WeightFormat, pick_format
from engine.models.registry import DecoderModel, build_model
from engine.tokenizer import ChatTokenizer
from kernels.planes import FORMATS, dequantise, pack

SHAPES = tuple(shape for name in ("Llama-3-8B", "Llama-3.2-1B", "Qwen2.5-7B") for shape in MODELS if shape.name == name)
TINY = Shape("tiny", 1, 256, 256, 2, 1, 128, 512, 512)
GGUF_NAMES = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down",
}  # fmt: skip
CONTEXT = 131072


def weight_format(device: torch.device) -> WeightFormat:
    """As the engine chooses on a card; interpreted, float16 everywhere, so that sizes are those of a card."""
    if device.type == "cuda":
        return pick_format(device, "auto", triton=True)
    return WeightFormat("float16", torch.float16, torch.float16, blocks=True, planes=True)


def config_json(shape: Shape) -> dict[str, Any]:
    """The `config.json` of such a model."""
    return {
        "model_type": "qwen2" if shape.qkv_bias else "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied,
    }


class RandomSource:
    """A `WeightSource`. `weights` names a mix of `benchmarks.roofline`; matrices have rows of about length one."""

    kind = "safetensors"
    path = Path("random")

    def __init__(self, shape: Shape, weights: str, device: torch.device, dtype: torch.dtype) -> None:
        self.metadata: dict[str, object] = config_json(shape)
        self._shape, self._weights, self._device, self._dtype = shape, weights, device, dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shape = self._shape
        found: dict[str, tuple[int, ...]] = {
            "embed.weight": (shape.vocab, shape.hidden),
            "norm.weight": (shape.hidden,),
        }
        if not shape.tied:
            found["head.weight"] = (shape.vocab, shape.hidden)
        sizes = layer_matrices(shape)
        for layer in range(shape.num_layers):
            prefix = f"layers.{layer}."
            found |= {f"{prefix}{norm}.weight": (shape.hidden,) for norm in ("attn_norm", "mlp_norm")}
            found |= {f"{prefix}{name}.weight": sizes[gguf] for name, gguf in GGUF_NAMES.items()}
            if shape.qkv_bias:
                found |= {f"{prefix}{name}.bias": sizes[GGUF_NAMES[name]][:1] for name in "qkv"}
        return found

    def load(self, name: str) -> Tensor:
        size = self.shapes()[name]
        if len(size) == 1:
            return torch.full(size, float(name.endswith("weight")), dtype=self._dtype, device=self._device)
        return torch.randn(size, dtype=self._dtype, device=self._device) * size[1] ** -0.5

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return self.load(name)[ids].float()

    def block_format(self, name: str) -> str | None:
        parts = name.split(".")
        layer = int(parts[1]) if parts[0] == "layers" else 0
        # A tied embedding is the head, and stored as one.
        head = name == "head.weight" or (name == "embed.weight" and self._shape.tied)
        gguf = "output" if head else GGUF_NAMES.get(parts[-2], "token_embd")
        found = weight_kind(self._weights, gguf, layer, self._shape.num_layers)
        return found if found in FORMATS else None

    def blocks(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        found = self.block_format(name)
        assert found is not None
        return random_blocks(found, *self.shapes()[name])

    def release(self) -> None:
        random_blocks.cache_clear()

    def same(self, first: str, second: str) -> bool:
        return first == second


@cache
def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [rows, bytes of a row] of a GGUF type: random codes and sub-scales, one scale for rows of length one."""
    fmt = FORMATS[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, columns // fmt.columns, fmt.nbytes), np.uint8)
    width = 2 if fmt.has_min else 1

    def scaled(part: np.ndarray[Any, np.dtype[np.uint8]], scale: float) -> None:
        part[..., fmt.scale_at : fmt.scale_at + 2 * width] = np.full(width, scale, np.float16).view(np.uint8)

    sample = blocks[:8].copy()
    scaled(sample, 1.0)
    size = float(dequantise(pack(sample.reshape(len(sample), -1), kind, columns)).square().mean().sqrt())
    scaled(blocks, columns**-0.5 / size)
    return blocks.reshape(rows, -1)


def random_model(shape: Shape, weights: str, device: torch.device) -> DecoderModel:
    """Built by the engine's own loader."""
    fmt = weight_format(device)
    return build_model(RandomSource(shape, weights, device, fmt.compute_dtype), device, fmt)


@cache
def plain_tokenizer(vocab: int) -> ChatTokenizer:
    """A name for every id, so that the engine has text to send."""
    backend = Tokenizer(models.BPE(vocab={f" w{i}" if i else "w": i for i in range(vocab)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
