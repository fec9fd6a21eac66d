"""What each layer of a model that attends sees and where it keeps K and V: from the model, and from options."""

from __future__ import annotations

from engine.config import EngineConfig, check_window
from engine.errors import ConfigError
from engine.kv_cache.layout import Layout, group_layers, neighbours
from engine.models.config import ModelConfig
from kernels.layer_groups import LayerGroup

ENDLESS_TOKENS = 2**17
"""A chat with sinks that is longer loses its oldest turns: rotations are computed in float32, and positions much
further on make them coarse."""


def attention_layout(config: EngineConfig, model: ModelConfig) -> Layout:
    """Raises `ConfigError` where the options do not fit the model."""
    check_window(config)
    asked = config.window is not None or config.share_layers > 1
    if asked and not model.num_attention_layers:
        option = "--window" if config.window is not None else "--share-layers"
        raise ConfigError(f"The model has no attention layers, so {option} does not apply to it.")
    context = model.max_position_embeddings
    if config.sinks and config.window is not None and config.window + config.sinks > context:
        raise ConfigError(f"--window and --sinks together must fit into the model's own context of {context} tokens.")
    kinds = layer_kinds(config, model)
    if model.kv_owners:
        if config.share_layers > 1:
            raise ConfigError("The model's own layers share keys and values, so --share-layers does not apply to it.")
        return group_layers(kinds, model.kv_owners)
    return group_layers(kinds, neighbours(kinds, config.share_layers))


def layer_kinds(config: EngineConfig, model: ModelConfig) -> tuple[LayerGroup, ...]:
    """Of each layer that attends. A window that the model declares is kept where it is narrower than the one asked for,
    without sinks: that is how it was trained. One that the whole context fits into is none."""
    length = context_limit(config, model)

    def kind(declared: int | None) -> LayerGroup:
        if config.window is not None and (declared is None or declared >= config.window):
            return LayerGroup(config.window, config.sinks) if config.window < length else LayerGroup()
        return LayerGroup(declared) if declared is not None and declared < length else LayerGroup()

    return tuple(kind(declared) for declared in model.windows)


def context_limit(config: EngineConfig, model: ModelConfig) -> int:
    """The longest that a sequence may get, before it is asked what memory holds. Raises `ConfigError`."""
    own = max(ENDLESS_TOKENS, model.max_position_embeddings) if config.sinks else model.max_position_embeddings
    if config.max_seq_len is not None and config.max_seq_len > own and not config.sinks:
        raise ConfigError(f"--max-seq-len {config.max_seq_len} is more than the model's own context of {own} tokens.")
    return config.max_seq_len or own
