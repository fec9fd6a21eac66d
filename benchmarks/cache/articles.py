"""What articles on KV caches compare: with and without one, K computed again or read, growth by copying or in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cache.setting import MIB, Setting, running, scratch, text_ids
from benchmarks.common import median, print_table
from engine.kv_cache.spec import KVCacheSpec
from engine.models.attention import Attention
from engine.models.decoder import DecoderModel
from engine.replay import Replay

DECODED = 8
"""Tokens per decode measurement with a cache."""


def measure(setting: Setting) -> dict[str, Any]:
    with scratch() as folder, running(setting, folder, snapshot_limit=0) as engine:
        parts = engine._need_parts()
        ids = text_ids(engine, setting.text, max(setting.decode_contexts) + DECODED * (setting.rounds + 1))
        model, spec = parts.model, parts.cache.spec
        rows = {
            count: {
                **decode(model, spec, ids, count, setting.rounds),
                **keys(model, count, setting.rounds),
                **growth(spec, count, setting.rounds),
            }
            for count in setting.decode_contexts
        }
    _print(rows)
    return {str(count): row for count, row in rows.items()}


def decode(model: DecoderModel, spec: KVCacheSpec, ids: tuple[int, ...], count: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one more token after `count`: from the cache, and by running all of them again."""
    cached = Replay(model, spec, count + DECODED * (rounds + 1))
    cached.extend(ids[:count])
    position = count

    def from_cache() -> None:
        nonlocal position
        for _ in range(DECODED):
            cached.extend(ids[position : position + 1])
            position += 1

    def anew() -> None:
        Replay(model, spec, count + 1).extend(ids[: count + 1])

    times = _alternate(rounds, from_cache, anew)
    return {"cached_ms": times[0] / DECODED, "uncached_ms": times[1]}


def keys(model: DecoderModel, count: int, rounds: int) -> dict[str, float]:
    """K and V of one layer's `count` tokens: read from a cache, or computed from the layer's input that was kept."""
    mixer = next(layer.mixer for layer in model.weights.layers if isinstance(layer.mixer, Attention))
    config = model.config
    inputs = torch.randn(count, config.hidden_size, dtype=model.dtype)
    kept = torch.randn(2, count, config.num_kv_heads, config.head_dim, dtype=model.dtype)
    into = torch.empty_like(kept)
    times = _alternate(rounds, lambda: into.copy_(kept), lambda: mixer.qkv(inputs))
    return {
        "k_read_ms": times[0],
        "k_recomputed_ms": times[1],
        "kv_bytes_per_layer": float(kept.nbytes),
        "input_bytes_per_layer": float(inputs.nbytes),
    }


def growth(spec: KVCacheSpec, count: int, rounds: int) -> dict[str, float]:
    """One token's K and V appended to `count` in all layers: by `torch.cat`, and written where there is room."""
    shape = (spec.num_layers, 2, spec.num_kv_heads, count, spec.head_dim)
    held = torch.zeros(shape, dtype=torch.float16)
    roomy = torch.zeros((*shape[:3], count + 1, spec.head_dim), dtype=torch.float16)
    token = torch.ones((*shape[:3], 1, spec.head_dim), dtype=torch.float16)

    def in_place() -> Tensor:
        return roomy[..., count:, :].copy_(token)

    times = _alternate(rounds, in_place, lambda: torch.cat((held, token), dim=3))
    return {"in_place_ms": times[0], "cat_ms": times[1], "cat_moves_bytes": float(2 * held.nbytes)}


@torch.inference_mode()
def _alternate(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Median milliseconds of each, run in turn; the first round only warms up."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, kept in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            kept.append(1e3 * (time.perf_counter() - start))
    return [median(kept[1:]) for kept in times]


def _print(rows: dict[int, dict[str, float]]) -> None:
    print_table(
        (
            "tokens",
            "decode cached, ms",
            "uncached, ms",
            "",
            "K, V read, ms",
            "recomputed, ms",
            "",
            "in place, ms",
            "cat, ms",
        ),
        [
            (
                count,
                f"{row['cached_ms']:.1f}",
                f"{row['uncached_ms']:.0f}",
                f"{row['uncached_ms'] / row['cached_ms']:.0f} x",
                f"{row['k_read_ms']:.3f}",
                f"{row['k_recomputed_ms']:.2f}",
                f"{row['k_recomputed_ms'] / row['k_read_ms']:.0f} x",
                f"{row['in_place_ms']:.3f}",
                f"{row['cat_ms']:.2f} ({row['cat_moves_bytes'] / MIB:.0f} MiB moved)",
            )
            for count, row in rows.items()
        ],
    )
