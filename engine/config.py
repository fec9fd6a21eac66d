"""Everything the engine can be told, as data. Filled from the command line by `app.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_FORMATS = ("auto", "fp32", "fp16", "bf16", "int8", "fp8", "int4")
SPECULATION = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one model is run.

    `model` is a hub name, a folder or a `.gguf` file; None is the default model. `max_seq_len` None takes the model's
    own context length, cut down to what `kv_budget` (bytes of KV cache; None: a share of free memory) can hold.
    `snapshot_limit` is how many bytes of disk the sessions' kept caches may take (None: a share of what is free, 0:
    none are kept); `ram_limit` how many bytes of RAM the caches of idle sessions may take that the pool has no room for
    (None: a share of what is free with a card, none without one, where the pool is in RAM itself).
    `fault_injection` lets callers damage a session's cache on purpose.
    `window` is how many of the newest tokens a layer sees at most (None: as the model says), `sinks` how many of the
    first ones it sees besides; with sinks a chat may be longer than the model's own context. `share_layers`
    neighbouring layers use one store of K and V: an experiment.
    `speculation` says whether tokens are guessed from the text so far and run ahead: "auto" where that is measured to
    pay.
    `chat_template` names a bundled template; None is the model's own, or a fallback where it has none.
    """

    data_dir: Path
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_format: str = "auto"
    max_seq_len: int | None = None
    kv_budget: int | None = None
    block_size: int = 16
    chat_template: str | None = None
    snapshot_limit: int | None = None
    ram_limit: int | None = None
    fault_injection: bool = False
    window: int | None = None
    sinks: int = 0
    share_layers: int = 1
    speculation: str = "auto"


def check_window(config: EngineConfig) -> None:
    """Whether the options fit each other. Raises `ConfigError`."""
    if config.window is None:
        if config.sinks:
            raise ConfigError("--sinks needs --window: without a window all tokens are kept.")
        return
    if config.window < config.block_size:
        raise ConfigError(
            f"--window {config.window} is less than a block of the cache, which holds {config.block_size} tokens."
        )
    if config.sinks >= config.window:
        raise ConfigError(f"--sinks {config.sinks} must be less than --window {config.window}.")
