"""Memory of a chat far past its window, how well its text is predicted, and what a narrower window saves."""

from __future__ import annotations

import uuid
from typing import Any

from benchmarks import window
from benchmarks.cache.setting import MIB, Setting, running, scratch, text_ids, turn
from benchmarks.common import print_table
from engine.config import EngineConfig
from engine.loader import load_parts

BUDGET = 2**30


def measure(setting: Setting) -> dict[str, Any]:
    """Bytes after each turn with sinks and a window, and perplexity by layout, as `benchmarks.window` has them.
    `constant`: in its second half the chat took at most a twentieth more than in its first, for windows end within
    blocks."""
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
        "narrower": narrower(setting),
        "tokens": len(ids),
        "largest_bytes": max(held),
        "last_bytes": held[-1],
        "constant": max(held[half:]) <= 1.05 * max(held[: half or 1]),
        "without_window_bytes": len(ids) * parts.cache.spec.bytes_per_token,
    }


def narrower(setting: Setting) -> dict[str, Any]:
    """Bytes that a session past both windows takes with the setting's window and with one four times as wide."""
    held = {}
    for width in (4 * setting.window, setting.window):
        session = str(uuid.uuid4())
        options = {"window": width, "sinks": setting.sinks, "snapshot_limit": 0, "kv_budget": BUDGET}
        with scratch() as folder, running(setting, folder, **options) as engine:
            turn(engine, text_ids(engine, setting.text, 5 * setting.window), session)
            held[width] = engine.inspect(session)["bytes_reserved"]
            expected = 3 * setting.window * engine.capabilities()["bytes_per_token"]
    wide, narrow = held
    print()
    print_table(
        (f"session of {5 * setting.window} tokens", "MiB"),
        [
            *((f"window {width}", f"{nbytes / MIB:.1f}") for width, nbytes in held.items()),
            ("saved", f"{(held[wide] - held[narrow]) / MIB:.1f}"),
            (f"{wide - narrow} tokens' keys and values", f"{expected / MIB:.1f}"),
        ],
    )
    return {"bytes": held, "saved_bytes": held[wide] - held[narrow], "expected_bytes": expected}
