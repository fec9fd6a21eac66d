"""A chat far past its window: memory over its length, and how well text is predicted, with and without sinks.

    python -m benchmarks.window [--tokens 10000] [--window 1024] [--sinks 4] [--turn 1000]

Memory: a session of the default model gets the text turn by turn, part of each as message, part as reply. Perplexity of
the same text, in stretches: with sinks and window, with the window alone, and as chats are usually truncated (when the
window is full the older half leaves, and the rest is computed again). The text is source code of Python's own library.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from app import default_data_dir
from benchmarks.common import print_json, print_table
from engine.config import EngineConfig
from engine.kv_cache.spec import KVCacheSpec
from engine.loader import EngineParts, load_parts
from engine.local import LocalEngine
from engine.memory.plan import human_bytes
from engine.models.registry import DecoderModel
from engine.protocol import Failed, GenerateRequest
from engine.replay import Replay
from engine.sampling.params import SamplingParams
from kernels.layer_groups import LayerGroup

SESSION = "00000000-0000-4000-8000-000000000001"
REPLY_TOKENS = 16
CHUNK = 256


def chat(engine: LocalEngine, ids: Sequence[int], turn: int) -> list[dict[str, int]]:
    """Memory after each turn of `turn` tokens."""
    rows = []
    for end in range(turn, len(ids) + 1, turn):
        prompt, reply = tuple(ids[: end - REPLY_TOKENS]), tuple(ids[end - REPLY_TOKENS : end])
        params = SamplingParams(temperature=0, ignore_eos=True)
        last = list(engine.generate(GenerateRequest(prompt, params, SESSION, forced_ids=reply)))[-1]
        if isinstance(last, Failed):
            raise SystemExit(str(last.error))
        report = engine.inspect(SESSION)
        rows.append(
            {
                "tokens": report["cache_pos"],
                "session_bytes": report["bytes_reserved"],
                "pool_bytes": engine.memory()["kv_reserved"],
                "process_bytes": psutil.Process().memory_info().rss,
            }
        )
    return rows


@torch.inference_mode()
def losses(model: DecoderModel, spec: KVCacheSpec, ids: Sequence[int], counted: int = 0) -> list[float]:
    """Negative log likelihood, in nats, of each id after the first `counted` and at least the first one."""
    replay, found, first = Replay(model, spec, len(ids)), [], max(counted, 1)
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        logits = replay.extend(chunk, len(chunk))
        targets = torch.tensor(ids[start + 1 : start + 1 + len(chunk)], device=logits.device)
        rows = logits[: len(targets)].log_softmax(-1).gather(1, targets[:, None])
        found += (-rows[:, 0]).tolist()
    return found[first - 1 :]


def truncated_losses(model: DecoderModel, spec: KVCacheSpec, ids: Sequence[int], window: int) -> list[float]:
    """The same where the older half of a full window leaves, and the newer one is computed again."""
    found: list[float] = []
    half = window // 2
    for start in range(0, len(ids), half):
        begin = max(start - half, 0)
        found += losses(model, spec, ids[begin : start + half], start - begin)
    return found


def perplexities(
    model: DecoderModel, spec: KVCacheSpec, ids: Sequence[int], window: int, sinks: int, stretch: int
) -> dict[str, list[float]]:
    """By layout, of each stretch of the text. `spec` has one group for all layers."""
    full = replace(spec, groups=(LayerGroup(),))
    found = {
        f"{sinks} sinks + window": losses(model, replace(spec, groups=(LayerGroup(window, sinks),)), ids),
        "window alone": losses(model, replace(spec, groups=(LayerGroup(window),)), ids),
        "truncation": truncated_losses(model, full, ids, window),
    }
    return {
        name: [_perplexity(values[i : i + stretch]) for i in range(0, len(values), stretch)]
        for name, values in found.items()
    }


def _perplexity(values: Sequence[float]) -> float:
    return round(math.exp(min(sum(values) / len(values), 700.0)), 3)


def measure(config: EngineConfig, ids: Sequence[int], parts: EngineParts, turn: int) -> dict[str, Any]:
    """Both tables' numbers; `config` has window and sinks."""
    assert config.window is not None
    engine = LocalEngine(config, lambda _: parts)
    engine.start()
    engine.wait_ready()
    try:
        memory = chat(engine, ids, turn)
    finally:
        engine.close()
    quality = perplexities(parts.model, parts.cache.spec, ids, config.window, config.sinks, turn)
    return {"window": config.window, "sinks": config.sinks, "memory": memory, "perplexity": quality}


def source_text() -> str:
    """Long enough for any of this."""
    return Path(argparse.__file__).read_text("utf-8")


def show(result: dict[str, Any]) -> None:
    head = ("tokens", "session", "KV pool", "process")
    names = ("session_bytes", "pool_bytes", "process_bytes")
    print_table(head, [(row["tokens"], *(human_bytes(row[name]) for name in names)) for row in result["memory"]])
    print()
    quality = result["perplexity"]
    ends = [row["tokens"] for row in result["memory"]]
    print_table(("up to token", *quality), list(zip(ends, *quality.values(), strict=False)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--turn", type=int, default=1000, help="tokens of a turn, and of a stretch of text")
    parser.add_argument("--model")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir())
    options = parser.parse_args()
    config = EngineConfig(
        options.data_dir, options.model, window=options.window, sinks=options.sinks, snapshot_limit=0, kv_budget=2**30
    )
    parts = load_parts(config)
    ids = parts.tokenizer.encode(source_text())[: options.tokens]
    result = measure(config, ids, parts, options.turn)
    show(result)
    print_json("window", {"model": parts.name, "tokens": len(ids), **result})


if __name__ == "__main__":
    main()
