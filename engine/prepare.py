"""What can begin before the model's libraries are imported."""

from __future__ import annotations

import shutil

from engine.config import EngineConfig
from kernels.cpu import kept


def prepare(config: EngineConfig) -> None:
    """Let a first start compile the CPU kernels beside the imports, if the model will run on the CPU."""
    on_card = config.device == "cuda" or (config.device == "auto" and shutil.which("nvidia-smi") is not None)
    if not on_card and config.dtype == "auto":
        kept.compile_ahead()
