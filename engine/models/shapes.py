"""Which tensors a model must have, and whether a file has them."""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import ModelFileError
from engine.models.architecture import Architecture
from engine.models.config import ModelConfig

Expected = Iterator[tuple[str, tuple[int, ...], bool]]
"""(name, shape, whether it must be there) of each tensor that is used."""


def check_shapes(
    shapes: dict[str, tuple[int, ...]], architecture: Architecture, config: ModelConfig, tied: bool
) -> None:
    """Raises `ModelFileError` naming what is missing, of another shape, or impossible."""
    _check_counts(config)
    missing = []
    for name, shape, required in _expected_shapes(architecture, config, tied):
        found = shapes.get(name)
        if found is None and required:
            missing.append(name)
        if found is not None and found != shape:
            raise ModelFileError(f"The model's tensor {name} has shape {list(found)}, not {list(shape)}.")
    if missing:
        raise ModelFileError(f"The model file lacks {len(missing)} tensors, the first is {missing[0]}.")


def _check_counts(config: ModelConfig) -> None:
    ssm = config.ssm
    wrong = config.num_layers < 1
    if config.num_attention_layers:
        wrong |= config.num_kv_heads < 1 or config.num_heads % max(config.num_kv_heads, 1) != 0
    if ssm is not None:
        wrong |= min(ssm.num_heads, ssm.head_dim, ssm.state_size, ssm.num_groups) < 1 or ssm.conv_width < 2
        wrong |= ssm.num_heads % max(ssm.num_groups, 1) != 0
    if wrong:
        raise ModelFileError("The model's configuration has impossible layer or head counts.")


def _expected_shapes(architecture: Architecture, config: ModelConfig, tied: bool) -> Expected:
    hidden = config.hidden_size
    yield "embed.weight", (config.vocab_size, hidden), True
    yield "norm.weight", (hidden,), True
    if not tied:
        yield "head.weight", (config.vocab_size, hidden), True
    yield from _altup(config)
    for layer in range(config.num_layers):
        prefix, before = f"layers.{layer}.", sum(1 for other in config.ssm_layers if other < layer)
        yield prefix + "attn_norm.weight", (hidden,), True
        if architecture.post_norms:
            yield prefix + "attn_post_norm.weight", (hidden,), True
            yield prefix + "mlp_post_norm.weight", (hidden,), True
        if layer in config.ssm_layers:
            yield from _recurrence(prefix, config)
        else:
            yield from _attention(prefix, architecture, config, config.owns_kv(layer - before))
        if architecture.mlp:
            yield prefix + "mlp_norm.weight", (hidden,), True
            yield from _products(prefix, _mlp_products(config))


def _attention(prefix: str, architecture: Architecture, config: ModelConfig, own: bool) -> Expected:
    """`own`: it has K and V."""
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden))
    yield from _products(prefix, sizes[: 3 if own else 1], architecture.qkv_bias)
    yield from _products(prefix, (("o", hidden, q),))
    if architecture.qk_norm:
        yield prefix + "q_norm.weight", (config.head_dim,), True
    if architecture.qk_norm and own:
        yield prefix + "k_norm.weight", (config.head_dim,), True


def _altup(config: ModelConfig) -> Expected:
    sizes, hidden = config.altup, config.hidden_size
    if sizes is None:
        return
    streams, size, rank = sizes.streams, sizes.input_size, sizes.laurel_rank
    yield "own_embed.weight", (sizes.input_vocab, config.num_layers * size), True
    yield "own_norm.weight", (size,), True
    others = [(f"{name}.{stream}", hidden, hidden) for name in ("expand", "merge") for stream in range(streams - 1)]
    yield from _products("", (("own_projection", config.num_layers * size, hidden), *others))
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for name in ("altup_norm.weight", "altup_scale", "laurel_norm.weight", "own_out_norm.weight"):
            yield prefix + name, (hidden,), True
        small = ("altup_router", streams, hidden), ("altup_predict", streams**2, streams)
        yield from _products(prefix, (*small, ("altup_correct", streams, streams)))
        yield from _products(prefix, (("laurel_left", rank, hidden), ("laurel_right", hidden, rank)))
        yield from _products(prefix, (("own_gate", size, hidden), ("own_out", hidden, size)))


def _recurrence(prefix: str, config: ModelConfig) -> Expected:
    ssm, hidden = config.ssm, config.hidden_size
    assert ssm is not None
    yield from _products(prefix, (("in_proj", ssm.inner + ssm.conv_channels + ssm.num_heads, hidden),))
    yield from _products(prefix, (("out_proj", hidden, ssm.inner),))
    yield prefix + "conv.weight", (ssm.conv_channels, 1, ssm.conv_width), True
    yield prefix + "conv.bias", (ssm.conv_channels,), False
    yield prefix + "ssm_norm.weight", (ssm.inner,), True
    for name in ("a_log", "d", "dt_bias"):
        yield prefix + name, (ssm.num_heads,), True


def _mlp_products(config: ModelConfig) -> tuple[tuple[str, int, int], ...]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return ("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)


def _products(prefix: str, sizes: tuple[tuple[str, int, int], ...], bias: bool = False) -> Expected:
    for name, rows, columns in sizes:
        yield f"{prefix}{name}.weight", (rows, columns), True
        yield f"{prefix}{name}.bias", (rows,), bias
