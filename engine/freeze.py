"""`--freeze`: load the model, freeze a text, end."""

from __future__ import annotations

import time
from dataclasses import replace

from engine.config import EngineConfig
from engine.local import LocalEngine
from engine.memory.plan import human_bytes


def freeze_text(config: EngineConfig, text: str, title: str) -> str:
    """One line that says what was done. Raises `KVScopeError`."""
    engine = LocalEngine(replace(config, snapshot_limit=0))
    engine.start()
    try:
        engine.wait_ready()
        began = time.perf_counter()
        done = engine.freeze(text, title)
        seconds = time.perf_counter() - began
    finally:
        engine.close()
    return f"Frozen {done['name']}: {done['tokens']} tokens, {human_bytes(done['bytes'])}, {seconds:.2f} s"
