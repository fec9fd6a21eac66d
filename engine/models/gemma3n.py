"""Gemma 3n's text model: AltUp streams, inputs of each layer's own, and last layers that have no K and V: they read
those of the last layer of their kind that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ModelFileError
from engine.models.architecture import Architecture
from engine.models.config import AltUpConfig, ModelConfig, number
from engine.models.gemma3 import config_from_gemma3

PATTERN = 5
SPARSE_LAYERS, SPARSITY = 10, 0.95
"""Where the file does not say: the first layers of a model with more."""


def config_from_gemma3n(values: Mapping[str, Any]) -> ModelConfig:
    """From the `config.json` of a `Gemma3nForCausalLM`, or of the whole model, whose text part is used. Raises
    `ModelFileError`."""
    values = values.get("text_config") or values
    layers = int(number(values, "num_hidden_layers"))
    inner = values.get("intermediate_size")
    sizes = set(inner) if isinstance(inner, list) else {inner}
    if len(sizes) != 1:
        raise ModelFileError("Models whose MLPs differ in size are not supported.")
    base = config_from_gemma3(
        {
            "sliding_window_pattern": PATTERN,
            "max_position_embeddings": 32768,
            **values,
            "intermediate_size": sizes.pop(),
            "final_logit_softcapping": None,
        }
    )
    cap = values.get("final_logit_softcapping", 30.0)
    return replace(
        base,
        query_scale=1.0,
        logit_cap=float(cap or 0.0),
        gate_sparsity=_sparsity(values, layers),
        kv_owners=kv_owners(base.windows, int(number(values, "num_kv_shared_layers", 15))),
        altup=AltUpConfig(
            streams=int(number(values, "altup_num_inputs", 4)),
            active=int(number(values, "altup_active_idx", 0)),
            scales=bool(values.get("altup_correct_scale", True)),
            laurel_rank=int(number(values, "laurel_rank", 64)),
            input_size=int(number(values, "hidden_size_per_layer_input", 256)),
            input_vocab=int(number(values, "vocab_size_per_layer_input", 262144)),
        ),
    )


def _sparsity(values: Mapping[str, Any], layers: int) -> tuple[float, ...]:
    found = values.get("activation_sparsity_pattern")
    if found is None:
        sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
        return (SPARSITY,) * sparse + (0.0,) * (layers - sparse)
    if not isinstance(found, list) or len(found) != layers or not all(0 <= share < 1 for share in found):
        raise ModelFileError("The model's activation_sparsity_pattern is not a share for each layer.")
    return tuple(map(float, found))


def kv_owners(windows: tuple[int | None, ...], shared: int) -> tuple[int, ...]:
    """For each layer the one whose K and V it uses: the last `shared` use those of the last one before them with the
    same window. Raises `ModelFileError` if there is none."""
    first = len(windows) - shared
    last = {window: layer for layer, window in enumerate(windows[: max(first, 0)])}
    if shared and not set(windows) <= last.keys():
        raise ModelFileError(f"The model's last {shared} layers share keys and values that no layer before them has.")
    return tuple(layer if layer < first else last[window] for layer, window in enumerate(windows))


GEMMA3N = Architecture(
    name="gemma3n",
    model_types=("gemma3n_text", "gemma3n"),
    qk_norm=True,
    v_norm=True,
    post_norms=True,
    read_json=config_from_gemma3n,
)
