"""Sampling settings as they come from outside: names and types are checked strictly, values by `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from engine.errors import InvalidRequest
from engine.sampling.params import SamplingParams

NAMES = frozenset(field.name for field in fields(SamplingParams))
LIMIT_ALIAS = "max_completion_tokens"
"""Another name of `max_tokens`; where both are given, the smaller one counts."""
_MAX_BIAS = 1e9


def parse_params(values: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
    """`base` (default: the defaults) with `values` in its place; None means "as in base". Raises `InvalidRequest`."""
    if not isinstance(values, Mapping):
        raise InvalidRequest("params must be an object.")
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in NAMES and name != LIMIT_ALIAS:
            raise InvalidRequest(f"There is no sampling setting named {str(name)[:40]!r}.")
        if value is not None:
            changes[name] = _converted(name, value)
    if LIMIT_ALIAS in changes:
        alias = changes.pop(LIMIT_ALIAS)
        changes["max_tokens"] = min(alias, changes.get("max_tokens", alias))
    return replace(base or SamplingParams(), **changes)


def _converted(name: str, value: Any) -> Any:
    if name == "stop":
        return _stop(value)
    if name == "logit_bias":
        return _logit_bias(value)
    if name == "ignore_eos" and not isinstance(value, bool):
        raise InvalidRequest(f"ignore_eos must be true or false, not {value!r:.40}.")
    if name in ("max_tokens", LIMIT_ALIAS) and (type(value) is not int or not 1 <= value < 2**31):
        # Each is checked by itself: a limit that makes no sense is not hidden by the other one.
        raise InvalidRequest(f"{name} must be a whole number of at least 1, not {value!r:.40}.")
    if isinstance(value, int) and abs(value) >= 2**64:
        raise InvalidRequest(f"{name} is too large.")
    if isinstance(value, str | list | dict):
        raise InvalidRequest(f"{name} must be a number.")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("stop must be text or a list of texts.")
    return tuple(texts)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequest("logit_bias must be an object of token ids and numbers.")
    biases: dict[int, float] = {}
    for token_id, bias in value.items():
        digits = str(token_id)
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 12):
            raise InvalidRequest("logit_bias must name tokens by their ids.")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= _MAX_BIAS:
            raise InvalidRequest("logit_bias must give a number for each token id.")
        biases[int(digits)] = bias
    return biases
