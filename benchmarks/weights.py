"""What keeping weights in few bits costs in quality and prefill speed on the CPU.

    python -m benchmarks.weights

Perplexity of the default model over the beginning of a text (this README, unless --text names another), in one prefill
with a float32 cache: with the file's own blocks, with all matrices in int8, and in float32; and the speed of that
prefill beside transformers in float32.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from app import default_data_dir
from benchmarks.common import median, print_json, print_table
from engine.batch import AttentionMetadata
from engine.kv_cache.cache import KVCache
from engine.kv_cache.spec import KVCacheSpec
from engine.models.registry import DecoderModel, load_model
from engine.tokenizer import ChatTokenizer
from engine.weights.catalog import ModelSource, resolve
from engine.weights.gguf_reader import GGUFSource
from kernels.kv_format import FP32

BLOCK_SIZE = 16
README = Path(__file__).parent.parent / "README.md"
CPU = torch.device("cpu")


def one_prefill(model: DecoderModel, token_ids: Tensor) -> Tensor:
    """Logits float32 [T, vocab]."""
    config, count = model.config, len(token_ids)
    cache = KVCache(KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, FP32), CPU)
    blocks = -(-count // BLOCK_SIZE)
    cache.grow(blocks + 1)
    meta = AttentionMetadata(
        positions=torch.arange(count),
        slot_mapping=torch.arange(count)[None] + BLOCK_SIZE,
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32)[None, None],
        context_lens=torch.tensor([count], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        logit_rows=torch.arange(count),
        query_lens=(count,),
        context_lens_host=(count,),
    )
    return model.forward(token_ids, cache, meta)


def perplexity(logits: Tensor, token_ids: Tensor) -> float:
    return float(F.cross_entropy(logits[:-1], token_ids[1:]).exp())


def load(source: ModelSource, kind: str) -> DecoderModel:
    if kind == "int8":
        with patch.object(GGUFSource, "block_format", lambda self, name: None):
            return load_model(source.path, CPU)
    return load_model(source.path, CPU, "auto" if kind == "file" else kind)


def speed(model: DecoderModel, token_ids: Tensor, rounds: int) -> float:
    """Tokens per second of a prefill."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        one_prefill(model, token_ids)
        times.append(time.perf_counter() - start)
    return len(token_ids) / median(times[1:])


def reference_speed(source: ModelSource, token_ids: Tensor, rounds: int) -> float:
    model = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    ).eval()
    times = []
    with torch.inference_mode():
        for _ in range(rounds + 1):
            start = time.perf_counter()
            model(token_ids[None])
            times.append(time.perf_counter() - start)
    return len(token_ids) / median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    parser.add_argument("--text", type=Path, default=README)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    source = resolve(None, arguments.data_dir)
    tokenizer = ChatTokenizer.from_source(source)
    ids = torch.tensor(tokenizer.encode(arguments.text.read_text())[: arguments.tokens])
    rows, result = [], {}
    for kind in ("file", "int8", "float32"):
        model = load(source, kind)
        value = perplexity(one_prefill(model, ids), ids)
        rate = speed(model, ids[:256], arguments.rounds)
        rows.append((kind, model.weight_format, f"{value:.3f}", f"{rate:.0f}"))
        result[kind] = {"perplexity": value, "prefill_tokens_per_s": rate}
    rate = reference_speed(source, ids[:256], arguments.rounds)
    rows.append(("transformers", "float32", "", f"{rate:.0f}"))
    print_table(("weights", "kept as", "perplexity", "prefill tokens/s"), rows)
    print_json("weights", {"model": source.name, "tokens": len(ids), **result, "prefill_tokens_per_s_reference": rate})


if __name__ == "__main__":
    main()
