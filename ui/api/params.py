"""Sampling settings as they come from outside: names and types are checked strictly, values by `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from engine.errors import InvalidRequest
from engine.sampling.params import MAX_TOKENS, SamplingParams, check_whole

NAMES = frozenset(field.name for field in fields(SamplingParams))
LIMIT_ALIAS = "max_completion_tokens"
"""Another name of `max_tokens`; where both are given, the smaller one counts."""
_MAX_DIGITS = 40


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
    if name in ("ignore_eos", "strip_thoughts") and not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, not {value!r:.40}.")
    if name in ("max_tokens", LIMIT_ALIAS):
        # Each is checked by itself: a limit that makes no sense is not hidden by the other one.
        check_whole(name, value, 1, MAX_TOKENS)
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
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS):
            raise InvalidRequest("logit_bias must name tokens by their ids.")
        biases[int(digits)] = bias
    return biases
