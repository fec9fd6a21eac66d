"""Memory of a chat far past its window, and how well its text is predicted: what `benchmarks.window` does."""

from __future__ import annotations

from typing import Any

from benchmarks import window
from benchmarks.cache.setting import Setting, scratch
from engine.config import EngineConfig
from engine.loader import load_parts

BUDGET = 2**30


def measure(setting: Setting) -> dict[str, Any]:
    """Bytes after each turn with sinks and a window, and perplexity by layout. `constant`: in its second half the chat
    took at most a twentieth more than in its first, for windows end within blocks."""
    with scratch() as folder:
        shared: dict[str, Any] = {"model": str(setting.model), "snapshot_limit": 0, "kv_budget": BUDGET}
        config = EngineConfig(folder, window=setting.window, sinks=setting.sinks, **shared)
        parts = load_parts(config)
        ids = parts.tokenizer.encode(window.source_text())[: setting.window_tokens]
        found = window.measure(config, ids, parts, setting.window_turn)
    window.show(found)
    held = [row["session_bytes"] for row in found["memory"]]
    half = len(held) // 2
    return {
        **found,
        "tokens": len(ids),
        "largest_bytes": max(held),
        "last_bytes": held[-1],
        "constant": max(held[half:]) <= 1.05 * max(held[: half or 1]),
        "without_window_bytes": len(ids) * parts.cache.spec.bytes_per_token,
    }
