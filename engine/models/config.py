"""What a decoder is, read from `config.json` or from GGUF metadata into one form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelFileError
from engine.models.windows import windows_from_json

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Of gated MLPs, by their names in files."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: the base, and how its frequencies are stretched past the context the model was trained on.

    `attention_factor` multiplies cos and sin; None is the kind's own. `beta_*` and `truncate` concern yarn,
    `low_freq_factor` and `high_freq_factor` llama3. `partial` is the share of each head that is rotated.
    """

    base: float = 10000.0
    partial: float = 1.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True)
class SSMConfig:
    """Sizes of Mamba-2 layers: `num_heads` heads of `head_dim` channels with a state of `state_size` each.

    B and C are shared by the heads of a group. Time steps are held between `dt_min` and `dt_max`.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    dt_min: float = 0.0
    dt_max: float = math.inf

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_columns(self) -> int:
        """Columns of B, and of C, in the projected row."""
        return self.num_groups * self.state_size

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.group_columns


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """Sizes of `engine.models.altup`: layers run on stream `active` of `streams`. Each layer has `input_size` inputs of
    its own for a token, of a table for `input_vocab` tokens; `scales`: what they are mixed into is scaled first."""

    streams: int
    active: int
    scales: bool
    laurel_rank: int
    input_size: int
    input_vocab: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder whose layers mix tokens by attention or, those in `ssm_layers`, by a Mamba-2 recurrence.

    `tied` None: the head is the embedding if the file has no other. `sliding_window` None: all tokens are attended to,
    as they are by the `global_layers` in any case; layers with the window have `local_rope` where it is given.
    `query_scale` multiplies scores, 0 means one over the root of head_dim; `embedding_scale` what is embedded.
    `kv_owners` says for each layer that attends whose K and V it uses; empty: its own. `logit_cap` bounds logits, 0: it
    does not. `gate_sparsity` is the share of each layer's gate that is set to 0; empty: none.
    Without attention `num_heads`, `num_kv_heads` and `head_dim` are 0, without MLPs `intermediate_size`.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tied: bool | None = None
    sliding_window: int | None = None
    global_layers: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    query_scale: float = 0.0
    embedding_scale: float = 1.0
    activation: str = "silu"
    kv_owners: tuple[int, ...] = ()
    logit_cap: float = 0.0
    gate_sparsity: tuple[float, ...] = ()
    altup: AltUpConfig | None = None
    ssm: SSMConfig | None = None
    ssm_layers: tuple[int, ...] = ()

    @property
    def num_attention_layers(self) -> int:
        """Layers that have K and V."""
        return self.num_layers - len(self.ssm_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """What each layer that attends sees of the past, in tokens with the newest; None: all."""
        attending = (layer for layer in range(self.num_layers) if layer not in self.ssm_layers)
        return tuple(None if layer in self.global_layers else self.sliding_window for layer in attending)

    def owns_kv(self, kv_layer: int) -> bool:
        """Whether a layer, counted among those that attend, has K and V."""
        return not self.kv_owners or self.kv_owners[kv_layer] == kv_layer

    @property
    def attention_scale(self) -> float:
        return self.query_scale or float(self.head_dim) ** -0.5

    @property
    def rotary_dim(self) -> int:
        """Leading channels of each head that are rotated."""
        return int(self.head_dim * self.rope.partial)


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> Any:
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelFileError(f"The model's configuration has no usable {key}.")
    return value


def config_from_json(values: Mapping[str, Any], partial_rotary: float = 1.0) -> ModelConfig:
    """From the content of a `config.json`. Raises `ModelFileError` naming what is missing or not supported.

    `partial_rotary` is the share of each head that the architecture rotates.
    """
    heads = int(number(values, "num_attention_heads"))
    hidden = int(number(values, "hidden_size"))
    context, layers = int(number(values, "max_position_embeddings", 2048)), int(number(values, "num_hidden_layers"))
    window, global_layers = windows_from_json(values, layers)
    return ModelConfig(
        model_type=str(values.get("model_type")),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=int(number(values, "intermediate_size")),
        num_heads=heads,
        num_kv_heads=int(number(values, "num_key_value_heads", heads)),
        head_dim=int(number(values, "head_dim", hidden // max(heads, 1))),
        vocab_size=int(number(values, "vocab_size")),
        max_position_embeddings=context,
        rms_norm_eps=float(number(values, "rms_norm_eps", 1e-6)),
        rope=rope_from_json(values, context, partial_rotary),
        tied=values.get("tie_word_embeddings"),
        sliding_window=window,
        global_layers=global_layers,
        activation=check_activation(values),
    )


def check_activation(values: Mapping[str, Any], known: Iterable[str] = ACTIVATIONS) -> str:
    """Its name in `ModelConfig`. Raises `ModelFileError` for one that is not `known`."""
    activation = values.get("hidden_act", "silu")
    if activation not in known:
        raise ModelFileError(f"The activation {activation!r} is not supported.")
    return ACTIVATIONS[activation]


def rope_from_json(values: Mapping[str, Any], context: int, partial: float) -> RopeConfig:
    """Files since transformers 5 hold `rope_parameters`; older ones `rope_theta` and `rope_scaling`."""
    scaling = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelFileError("Rotary settings that differ from layer to layer are not supported.")
    if scaling.get("partial_rotary_factor", values.get("partial_rotary_factor", partial)) != partial:
        raise ModelFileError("Rotary embedding of such a part of each head is not supported.")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    original = int(scaling.get("original_max_position_embeddings") or context)
    return checked_rope(
        RopeConfig(
            base=float(scaling.get("rope_theta") or values.get("rope_theta") or 10000.0),
            partial=partial,
            kind=str(kind),
            factor=float(scaling.get("factor") or context / original),
            original_context=original,
            attention_factor=scaling.get("attention_factor"),
            mscale=float(scaling.get("mscale") or 0.0),
            mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            truncate=bool(scaling.get("truncate", True)),
            low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
            high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        )
    )


def config_from_gguf(metadata: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """From a GGUF file's metadata; `vocab_size` is the number of rows of its embedding."""
    arch = str(metadata.get("general.architecture"))
    prefix = f"{arch}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if values.get("expert_count"):
        raise ModelFileError("Mixture-of-experts models are not supported.")
    heads = int(number(values, "attention.head_count"))
    hidden = int(number(values, "embedding_length"))
    head_dim = int(number(values, "attention.key_length", hidden // max(heads, 1)))
    context = int(number(values, "context_length", 2048))
    if int(number(values, "rope.dimension_count", head_dim)) != head_dim:
        raise ModelFileError("Rotary embedding of a part of each head is not supported.")
    if int(number(values, "attention.value_length", head_dim)) != head_dim:
        raise ModelFileError("Values of another size than keys are not supported.")
    return ModelConfig(
        model_type=arch,
        num_layers=int(number(values, "block_count")),
        hidden_size=hidden,
        intermediate_size=int(number(values, "feed_forward_length")),
        num_heads=heads,
        num_kv_heads=int(number(values, "attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        rms_norm_eps=float(number(values, "attention.layer_norm_rms_epsilon", 1e-6)),
        rope=_rope_from_gguf(values, context),
        sliding_window=int(number(values, "attention.sliding_window", 0)) or None,
    )


def _rope_from_gguf(values: Mapping[str, Any], context: int) -> RopeConfig:
    """llama3 scaling is no kind of its own here: such files carry the divisors as a tensor (`rope_freqs`)."""
    kind = values.get("rope.scaling.type") or ("linear" if values.get("rope.scale_linear") else "none")
    original = int(number(values, "rope.scaling.original_context_length", context))
    default_factor = float(values.get("rope.scale_linear") or 1.0)
    attention_factor = values.get("rope.scaling.attn_factor") or values.get("rope.scaling.yarn_attn_factor")
    return checked_rope(
        RopeConfig(
            base=float(number(values, "rope.freq_base", 10000.0)),
            kind="default" if kind == "none" else str(kind),
            factor=float(number(values, "rope.scaling.factor", default_factor)),
            original_context=original,
            attention_factor=None if attention_factor is None else float(attention_factor),
            beta_fast=float(number(values, "rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(number(values, "rope.scaling.yarn_beta_slow", 1.0)),
        )
    )


def checked_rope(rope: RopeConfig) -> RopeConfig:
    if rope.kind not in ROPE_KINDS:
        raise ModelFileError(f"Rotary scaling of kind {rope.kind!r} is not supported; {', '.join(ROPE_KINDS)} are.")
    return rope
