"""Which layers of a model see only a window of the past, as its file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelFileError

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def windows_from_json(values: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """`(window, layers that see everything all the same)` of a `config.json`; the window is None where none is used.

    `layer_types` says it layer by layer. Without it Qwen's files have a switch, off unless set, and let the first
    `max_window_layers` see everything; Mistral's window is that of all layers. Raises `ModelFileError`.
    """
    window, kinds = values.get("sliding_window"), values.get("layer_types")
    first = values.get("max_window_layers")
    if not values.get("use_sliding_window", first is None) or window is None:
        return None, ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ModelFileError("The model's configuration has no usable sliding_window.")
    if kinds is None:
        kinds = [GLOBAL if first is not None and layer < first else LOCAL for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {LOCAL, GLOBAL}:
        raise ModelFileError(f"The model's layer_types are not {num_layers} of {LOCAL} and {GLOBAL}.")
    return window if LOCAL in kinds else None, tuple(i for i, kind in enumerate(kinds) if kind == GLOBAL)
