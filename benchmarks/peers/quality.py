"""What the speed costs: perplexity of a fixed text, as the app runs the model and with weights widened to float32."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from engine.batch import AttentionMetadata
from engine.kv_cache.cache import EXTENT_BYTES, KVCache
from engine.kv_cache.spec import KVCacheSpec
from engine.models.registry import load_model
from engine.tokenizer import ChatTokenizer
from engine.weights.catalog import resolve
from kernels.kv_format import KV_FORMATS
from kernels.layer_groups import LayerGroup, default_places

BLOCK, CHUNK = 16, 256


def perplexity(model_path: Path, ids: list[int], dtype: str, kv_format: str) -> float:
    """Of ids[1:], each after all before it."""
    model = load_model(model_path, torch.device("cpu"), dtype)
    config, fmt = model.config, KV_FORMATS[kv_format]
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, fmt, (LayerGroup(),))
    spec = KVCacheSpec(*sizes, default_places(config.num_layers))
    cache, blocks = KVCache(spec, model.device, EXTENT_BYTES), -(-len(ids) // BLOCK)
    cache.grow(blocks + 1)
    loss, table = 0.0, torch.arange(1, blocks + 1, dtype=torch.int32)
    for start in range(0, len(ids), CHUNK):
        tokens = torch.tensor(ids[start : start + CHUNK])
        logits = model.forward(tokens, cache, _metadata(start, len(tokens), table))
        targets = torch.tensor(ids[start + 1 : start + 1 + len(tokens)])
        loss += float(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum"))
    return math.exp(loss / (len(ids) - 1))


def _metadata(start: int, count: int, table: torch.Tensor) -> AttentionMetadata:
    positions = torch.arange(start, start + count)
    return AttentionMetadata(
        positions=positions,
        slot_mapping=(table.long()[positions // BLOCK] * BLOCK + positions % BLOCK)[None],
        block_tables=table[None, None],
        context_lens=torch.tensor([start + count], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        logit_rows=torch.arange(count),
        query_lens=(count,),
        context_lens_host=(start + count,),
        state_slots=(),
    )


def compare(model_path: Path, data_dir: Path, tokens: int) -> tuple[float, float]:
    """Perplexity of the README's first tokens: as the app runs the model, and in float32 throughout."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    tokenizer = ChatTokenizer.from_source(resolve(str(model_path), data_dir), None)
    ids = list(tokenizer.encode(text))[:tokens]
    return perplexity(model_path, ids, "auto", "fp16"), perplexity(model_path, ids, "float32", "fp32")
