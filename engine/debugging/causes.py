"""What speaks for each cause of a loop: the reply is run again with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.debugging.loop_case import MOST_DRAWN, RUNS, LoopCase, draws
from engine.debugging.protocol import TokenMeasure
from engine.debugging.replays import ROWS, KeptAs, Redrawn, distance_from_draw, follow, kept_as
from engine.debugging.verdict import LOST, Findings, advice, changed_params, drift, judge, stronger
from engine.jobs import Slices
from engine.kv_cache.calibration import precision_loss
from engine.kv_cache.prefixes import common_prefix_len
from engine.sampling.measure import measure
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingState
from kernels.kv_format import FP32

NOISE_ROWS = 11
"""The noise is measured by a prefill in steps of another size than `ROWS`."""
ROUNDING = 0.05
"""Another token than the reply's is no more than rounding where so little probability made the difference."""


def cache_findings(case: LoopCase, audit: Mapping[str, Any] | None) -> Slices[Findings]:
    """The live cache's audit, live measures against a fresh prefill of the same ids, and a fresh draw."""
    query, faults = case.query, None
    if audit is not None:
        faults = len(audit["faults"]) if audit.get("verdict") == "fault" else 0
        sentence = str(audit.get("sentence") or ("The live cache has a fault." if faults else "The cache is sound."))
        case.evidence.append({"run": "audit", "faults": faults, "sentence": sentence})
    moved = None
    if query.measures:
        moved = yield from _drift(case)
    looped, drawn = yield from draws(case, "fresh", case.kept, query.params, {})
    rounding = True
    if not looped[0] and moved is None:
        rounding = yield from _is_rounding(case, drawn[0])
    return Findings(case.loop, faults, moved, looped, rounding)


def _drift(case: LoopCase) -> Slices[Any]:
    reply = case.query.reply_ids[: case.noticed]
    fresh = yield from _measures(case, reply, ROWS)
    other = yield from _measures(case, reply, NOISE_ROWS)
    moved = drift(case.query.measures, fresh, other)
    if moved.first is None:
        sentence = f"What was measured live is what a fresh prefill gives, within {moved.worst:.2g} nats."
    else:
        sentence = (
            f"From token {moved.first} of the reply on, the model saw something else than these ids: what was measured "
            f"live is up to {moved.worst:.2g} nats off, and rounding explains {moved.allowed:.2g}."
        )
    values = {"worst": round(moved.worst, 4), "allowed": round(moved.allowed, 4), "first": moved.first}
    case.evidence.append({"run": "measures", **values, "sentence": sentence})
    return moved


def _measures(case: LoopCase, reply: Sequence[int], rows: int) -> Slices[list[TokenMeasure]]:
    found: list[TokenMeasure] = []

    def take(index: int, logits: Tensor) -> None:
        found.append(measure(logits.float().cpu(), reply[index]))

    yield from follow(case.parts, case.kept, case.query.prompt_ids, reply, take, rows)
    return found


def _is_rounding(case: LoopCase, drawn: Redrawn) -> Slices[bool]:
    """Whether the fresh draw left the reply where little more in a logit would have drawn the reply's token."""
    query, reply = case.query, case.query.reply_ids
    at = case.begin + common_prefix_len(drawn.token_ids, reply[case.begin :])
    if at >= len(reply) or at - case.begin >= len(drawn.token_ids):
        return True
    state = SamplingState(query.params, query.prompt_ids, case.parts.vocab_size)
    for token_id in reply[:at]:
        state.accept(token_id)
    distances: list[float] = []

    def take(index: int, logits: Tensor) -> None:
        if index == at:
            distances.append(distance_from_draw(logits, state, reply[at]))

    yield from follow(case.parts, case.kept, query.prompt_ids, reply[: at + 1], take)
    return distances[0] < ROUNDING


def precision_findings(case: LoopCase, found: Findings) -> Slices[tuple[Findings, str | None]]:
    """The same draw with a float32 cache, where the reply's was a smaller one; the smallest format that helps."""
    parts, params = case.parts, case.query.params
    if case.kept.spec.format == FP32 or not case.kept.spec.num_layers:
        return found, None
    exact = yield from kept_as(parts, "fp32")
    kl = yield from _kl(case, exact)
    # Where there is chance in it one draw proves little; greedily there is but one, and another reply may be chance.
    if kl < LOST or params.temperature == 0:
        looped, _ = yield from draws(case, "fp32", exact, params, {})
        found, begin = replace(found, exact=looped, kl=kl), None
    else:
        found, begin = (yield from _both_formats(case, replace(found, kl=kl), exact)), None
        if judge(found) != "precision" and case.begin > 0 and case.noticed <= MOST_DRAWN:
            # What the smaller format wrote before the loop may lead into it in any format.
            found, begin = (yield from _both_formats(case, found, exact, "_anew", 0)), 0
    next(item for item in case.evidence if item["run"] == "fp32")["mean_kl"] = round(kl, 5)
    if judge(found) != "precision":
        return found, None
    half = yield from kept_as(parts, "fp16")
    looped, _ = yield from draws(case, "fp16", half, params, {}, begin=begin)
    return found, "fp32" if looped[0] else "fp16"


def _both_formats(
    case: LoopCase, found: Findings, exact: KeptAs, suffix: str = "", begin: int | None = None
) -> Slices[Findings]:
    """Several draws in the reply's format and with a float32 cache; the latter alone where it loops too."""
    params, fresh = case.query.params, found.fresh
    count = case.as_long(case.begin if begin is None else begin)
    looped, _ = yield from draws(case, "fp32" + suffix, exact, params, {}, RUNS, begin, count)
    if 2 * looped[0] <= looped[1]:
        fresh, _ = yield from draws(case, "fresh" + suffix, case.kept, params, {}, RUNS, begin, count)
    return replace(found, fresh=fresh, exact=looped)


def _kl(case: LoopCase, exact: KeptAs) -> Slices[float]:
    """Mean KL(float32 || the reply's format) along the reply, in nats."""
    prompt, reply = case.query.prompt_ids, case.query.reply_ids[: case.noticed]
    rows: dict[int, Tensor] = {}
    losses: list[float] = []

    def compare(index: int, logits: Tensor) -> None:
        losses.append(precision_loss(rows.pop(index)[None], logits[None]).mean_kl)

    both = (
        follow(case.parts, exact, prompt, reply, rows.__setitem__),
        follow(case.parts, case.kept, prompt, reply, compare),
    )
    yield from _side_by_side(*both)
    return sum(losses) / len(losses)


def _side_by_side(first: Slices[None], second: Slices[None]) -> Iterator[None]:
    """A slice of the first, then one of the second, and so on: both have as many."""
    done = object()
    while next(first, done) is not done:
        yield
        next(second, done)
        yield
    next(second, done)


def sampler_findings(case: LoopCase, found: Findings) -> Slices[tuple[Findings, dict[str, Any]]]:
    """Greedy, for comparison; with the settings changed as advised; if that does not help, more strongly.

    What the reply's own settings wrote before the loop may lead into it whatever is set then, and other settings may
    lead into another loop from the start. So the whole reply decides, which is what following the advice comes to.
    """
    params = case.query.params
    whole = 0 if case.noticed <= MOST_DRAWN else case.begin
    yield from draws(case, "greedy", case.kept, SamplingParams(temperature=0, ignore_eos=params.ignore_eos), {})
    changes = advice(params)
    if changes:
        advised = changed_params(params, changes)
        looped, _ = yield from draws(case, "advised", case.kept, advised, changes, RUNS)
        if case.begin > whole:
            looped, _ = yield from draws(case, "anew", case.kept, advised, changes, RUNS, whole)
        found = replace(found, advised=looped)
        if 2 * looped[0] <= looped[1]:
            return found, changes
    changes = stronger(params)
    looped, _ = yield from draws(case, "stronger", case.kept, changed_params(params, changes), changes, RUNS, whole)
    return found, changes if 2 * looped[0] <= looped[1] else {}
