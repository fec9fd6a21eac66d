"""Who made a reply loop: from what the replays found to a verdict and the setting that cures it. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.debugging.protocol import TokenMeasure
from engine.protocol import Loop
from engine.sampling.params import SamplingParams

SANE = {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.1}
STRONG = {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.3}
LOWEST_TEMPERATURE, LOWEST_TOP_P, HIGHEST_MIN_P, LOWEST_TOP_K = 0.5, 0.8, 0.3, 10
"""A sampler that leaves fewer tokens to choose from follows the likeliest one around a loop."""
LOST = 0.02
"""Mean KL divergence, in nats, from which on a KV format may change what a model says, and not only how it rounds."""
RUINED = 0.3
"""The same from which on it is known to spoil the text, so that less has to speak against it."""
SHARE, SHARE_RUINED = 0.5, 0.4
"""Of the runs, how many more loop in the format than with a float32 cache where the format is to blame."""
MOVED = 0.25
"""Least difference, in nats, between what was measured live and what is computed anew that is no rounding."""
FLOORS = 5
"""So many times the difference that another cutting into steps makes is no rounding either."""
VERDICTS = ("none", "model", "sampler", "precision", "cache")


@dataclass(frozen=True, slots=True)
class Drift:
    """How far live measures lie from those of a fresh prefill: the worst in nats, what rounding explains of it (nats),
    and the first token of the reply that lies beyond."""

    worst: float
    allowed: float
    first: int | None


@dataclass(frozen=True, slots=True)
class Findings:
    """What there is to judge by; None where it was not looked at. Counts are of runs that looped, and of runs."""

    loop: Loop | None
    audit_faults: int | None = None
    drift: Drift | None = None
    fresh: tuple[int, int] | None = None
    parted_by_rounding: bool = True
    exact: tuple[int, int] | None = None
    kl: float | None = None
    advised: tuple[int, int] | None = None


def judge(found: Findings) -> str:
    """One of `VERDICTS`. A cause further down the machine is named first: what it breaks no setting above can answer
    for."""
    if found.loop is None:
        return "none"
    if found.audit_faults or (found.drift is not None and found.drift.first is not None):
        return "cache"
    if found.drift is None and found.fresh is not None and not _loops(found.fresh) and not found.parted_by_rounding:
        return "cache"
    if found.exact is not None and found.fresh is not None and (found.kl or 0.0) >= LOST:
        more = _share(found.fresh) - _share(found.exact)
        if not _loops(found.exact) and more >= (SHARE_RUINED if (found.kl or 0.0) >= RUINED else SHARE):
            return "precision"
    if found.advised is not None and not _loops(found.advised):
        return "sampler"
    return "model"


def _loops(runs: tuple[int, int]) -> bool:
    """More runs than not."""
    return 2 * runs[0] > runs[1]


def _share(runs: tuple[int, int]) -> float:
    return runs[0] / runs[1]


def drift(live: Sequence[TokenMeasure], fresh: Sequence[TokenMeasure], other: Sequence[TokenMeasure]) -> Drift:
    """Compare what was measured while a reply was sampled with a fresh prefill of the same ids.

    `other` is a second prefill in other steps; how far the two lie apart is the noise. Log probability and entropy
    count: in a loop both are near 0 whatever the cache holds, so the worst token tells, not the mean.
    """
    count = min(len(live), len(fresh), len(other))
    noise = max((_apart(fresh[i], other[i]) for i in range(count)), default=0.0)
    allowed = max(FLOORS * noise, MOVED)
    moved = [_apart(live[i], fresh[i]) for i in range(count)]
    first = next((index for index, value in enumerate(moved) if value > allowed), None)
    return Drift(max(moved, default=0.0), allowed, first)


def _apart(left: TokenMeasure, right: TokenMeasure) -> float:
    """The likelier the token was to one of both, the more its log probability counts: that of a token in the far tail
    moves by whole nats when a logit is rounded otherwise."""
    weight = min(1.0, 10 * math.exp(max(left.logprob, right.logprob)))
    return max(weight * abs(left.logprob - right.logprob), abs(left.entropy - right.entropy))


def advice(params: SamplingParams) -> dict[str, Any]:
    """Settings to change so that the sampler does not lead into loops by itself: only those that do, by name."""
    changed: dict[str, Any] = {}
    if params.temperature < LOWEST_TEMPERATURE:
        changed["temperature"] = SANE["temperature"]
    if params.top_p < LOWEST_TOP_P:
        changed["top_p"] = SANE["top_p"]
    if 0 < params.top_k < LOWEST_TOP_K:
        changed["top_k"] = 0
    if params.min_p > HIGHEST_MIN_P:
        changed["min_p"] = 0.05
    if params.repetition_penalty < SANE["repetition_penalty"]:
        changed["repetition_penalty"] = SANE["repetition_penalty"]
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(params, name) < 0:
            changed[name] = 0.0
    if any(bias > 0 for bias in params.logit_bias.values()):
        changed["logit_bias"] = {token_id: bias for token_id, bias in params.logit_bias.items() if bias <= 0}
    return changed


def stronger(params: SamplingParams) -> dict[str, Any]:
    """What is left to try where advice did not help: penalties that cost some fluency."""
    changed = {**advice(params)}
    for name, value in STRONG.items():
        if getattr(params, name) < value:
            changed[name] = value
    return changed


def changed_params(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """The settings with some changed, for a replay: stop strings have no say in whether a text loops."""
    return replace(params, **changes, stop=(), top_logprobs=None)


def cure(verdict: str, params: Mapping[str, Any] | None = None, kv_format: str | None = None) -> dict[str, Any] | None:
    """`{params | repair, sentence}`; None where nothing was found to help."""
    if verdict == "cache":
        return {"repair": True, "sentence": "Compute the cache again from the first bad position; the text stays."}
    if verdict == "precision" and kv_format is not None:
        return {
            "params": {"kv_format": kv_format},
            "sentence": f"Keep this chat's cache in {kv_format} and regenerate the reply.",
        }
    if verdict in ("sampler", "model") and params:
        shown = ", ".join(f"{name} {value}" for name, value in params.items())
        return {"params": dict(params), "sentence": f"Set {shown} and regenerate the reply."}
    return None


def loop_dict(loop: Loop | None) -> dict[str, Any] | None:
    return None if loop is None else asdict(loop)
