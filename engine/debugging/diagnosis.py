"""Whose fault a loop is: the reply is run again beside its session, from just before the loop, with one thing changed
at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from engine.debugging.loops import MAX_PERIOD, REPEATS, LoopDetector, find_loop, word_test
from engine.debugging.protocol import DiagnoseQuery, TokenMeasure
from engine.debugging.replays import (
    ROWS,
    KeptAs,
    Redrawn,
    check_room,
    distance_from_draw,
    follow,
    kept_as,
    redraw,
)
from engine.debugging.verdict import (
    Findings,
    advice,
    changed_params,
    cure,
    drift,
    judge,
    loop_dict,
    stronger,
)
from engine.errors import InvalidRequest, Stopped
from engine.jobs import Slices
from engine.kv_cache.calibration import precision_loss
from engine.kv_cache.prefixes import common_prefix_len
from engine.loader import EngineParts
from engine.protocol import Loop
from engine.sampling.measure import measure
from engine.sampling.params import MAX_SEED, SamplingParams, check_whole
from engine.sampling.sampler import SamplingState
from kernels.kv_format import FP32, KV_FORMATS

RUNS = 3
"""Draws with other random numbers where there is chance in it."""
SEED_STEP = 1_000_003
MOST_DRAWN = 384
LEAST_DRAWN = REPEATS * MAX_PERIOD
NOISE_ROWS = 11
"""The noise is measured by a prefill in steps of another size than `ROWS`."""
ROUNDING = 0.05
"""Another token than the reply's is no more than rounding where so little probability made the difference."""


def audited(
    audit: Callable[..., Mapping[str, Any]] | None, session_id: str, cancelled: Callable[[], bool]
) -> Mapping[str, Any] | None:
    """What an audit of the session's live cache finds; None where there is no such thing, or nothing is cached."""
    try:
        return None if audit is None else audit(session_id, cancelled=cancelled)
    except Stopped:
        raise Stopped("The diagnosis was stopped.") from None


def check_query(query: DiagnoseQuery) -> None:
    """Raises `InvalidRequest`."""
    if query.max_tokens is not None:
        check_whole("max_tokens", query.max_tokens, 1, 2**31 - 1)
    if query.kv_format is not None and query.kv_format not in KV_FORMATS:
        raise InvalidRequest(f"There is no KV format {query.kv_format!r:.40}.")
    if not query.prompt_ids:
        raise InvalidRequest("The prompt of this reply can't be rendered any more.")


@dataclass(slots=True)
class _Case:
    """One reply that loops, what it is run again with, and the evidence so far."""

    parts: EngineParts
    query: DiagnoseQuery
    loop: Loop
    noticed: int
    kept: KeptAs
    kv_format: str
    is_word: Callable[[int], bool]
    evidence: list[dict[str, Any]] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """The reply's first token that is drawn anew; a near-loop is noticed late, so one begins a period earlier."""
        return max(self.loop.start - (MAX_PERIOD if self.loop.near else 0), 0)

    def count(self, begin: int) -> int:
        """Tokens to draw from `begin` on: twice what the reply took, so that another loop has the time to show."""
        wanted = min(max(2 * (self.noticed - begin), LEAST_DRAWN), MOST_DRAWN)
        room = self.parts.max_seq_len - len(self.query.prompt_ids) - begin
        return max(min(wanted, room, self.query.max_tokens or wanted), 1)


def diagnose(parts: EngineParts, query: DiagnoseQuery, audit: Mapping[str, Any] | None) -> Slices[dict[str, Any]]:
    """The body of `POST /api/sessions/{id}/diagnose`. Touches no session.

    Raises `InvalidRequest` if the replays would not fit into what the KV budget has left.
    """
    began = time.perf_counter()
    is_word = word_test(parts.tokenizer.shown_bytes)
    loop = find_loop(query.reply_ids, is_word)
    if loop is None:
        return _report(None, "none", [], None, began)
    kv_format = query.kv_format or parts.kv_format
    check_room(parts, len(query.prompt_ids) + len(query.reply_ids) + MOST_DRAWN, caches=2)
    kept = yield from kept_as(parts, kv_format)
    noticed = _noticed(query.reply_ids, loop, is_word)
    case = _Case(parts, query, loop, noticed, kept, kv_format, is_word)
    found = yield from _cache(case, audit)
    if judge(found) != "cache":
        found, format_cure = yield from _precision(case, found)
        if judge(found) != "precision":
            found, params_cure = yield from _sampler(case, found)
            verdict = judge(found)
            return _report(loop, verdict, case.evidence, cure(verdict, params_cure), began)
        return _report(loop, "precision", case.evidence, cure("precision", kv_format=format_cure), began)
    return _report(loop, "cache", case.evidence, cure("cache"), began)


def _report(
    loop: Loop | None, verdict: str, evidence: list[dict[str, Any]], remedy: dict[str, Any] | None, began: float
) -> dict[str, Any]:
    ms = round(1e3 * (time.perf_counter() - began), 1)
    return {"loop": loop_dict(loop), "verdict": verdict, "evidence": evidence, "cure": remedy, "ms": ms}


def _noticed(reply: Sequence[int], loop: Loop, is_word: Callable[[int], bool]) -> int:
    """How many tokens of the reply it took to see the loop."""
    detector = LoopDetector(is_word)
    for count, token_id in enumerate(reply, start=1):
        found = detector.push(token_id)
        if found is not None and found.period == loop.period and found.start == loop.start:
            return count
    return len(reply)


# -- cache ----------------------------------------------------------------------------------------------------------


def _cache(case: _Case, audit: Mapping[str, Any] | None) -> Slices[Findings]:
    """The live cache's audit, live measures against a fresh prefill of the same ids, and a fresh draw."""
    query, faults = case.query, None
    if audit is not None:
        faults = len(audit["faults"]) if audit.get("verdict") == "fault" else 0
        sentence = str(audit.get("sentence") or ("The live cache has a fault." if faults else "The cache is sound."))
        case.evidence.append({"run": "audit", "faults": faults, "sentence": sentence})
    moved = None
    if query.measures:
        moved = yield from _drift(case)
    looped, drawn = yield from _draws(case, "fresh", case.kept, query.params, {})
    rounding = True
    if not looped[0] and moved is None:
        rounding = yield from _is_rounding(case, drawn[0])
    return Findings(case.loop, faults, moved, looped, rounding)


def _drift(case: _Case) -> Slices[Any]:
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


def _measures(case: _Case, reply: Sequence[int], rows: int) -> Slices[list[TokenMeasure]]:
    found: list[TokenMeasure] = []

    def take(index: int, logits: Tensor) -> None:
        found.append(measure(logits.float().cpu(), reply[index]))

    yield from follow(case.parts, case.kept, case.query.prompt_ids, reply, take, rows)
    return found


def _is_rounding(case: _Case, drawn: Redrawn) -> Slices[bool]:
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


# -- precision and sampler --------------------------------------------------------------------------------------------


def _precision(case: _Case, found: Findings) -> Slices[tuple[Findings, str | None]]:
    """The same draw with a float32 cache, where the reply's was a smaller one; the smallest format that helps."""
    parts, query = case.parts, case.query
    if case.kept.spec.format == FP32 or not case.kept.spec.num_layers:
        return found, None
    exact = yield from kept_as(parts, "fp32")
    kl = yield from _kl(case, exact)
    looped, _ = yield from _draws(case, "fp32", exact, query.params, {})
    found = replace(found, exact=looped, kl=kl)
    if query.params.temperature > 0 and judge(found) == "precision":
        # One draw proves little where there is chance in it.
        again, _ = yield from _draws(case, "fresh", case.kept, query.params, {}, RUNS)
        looped, _ = yield from _draws(case, "fp32", exact, query.params, {}, RUNS)
        found = replace(found, fresh=again, exact=looped)
    case.evidence[-1]["mean_kl"] = round(kl, 5)
    if judge(found) != "precision":
        return found, None
    half = yield from kept_as(parts, "fp16")
    looped, _ = yield from _draws(case, "fp16", half, query.params, {})
    return found, "fp32" if looped[0] else "fp16"


def _kl(case: _Case, exact: KeptAs) -> Slices[float]:
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


def _sampler(case: _Case, found: Findings) -> Slices[tuple[Findings, dict[str, Any]]]:
    """Greedy, for comparison; with the settings changed as advised; if that does not help, more strongly.

    What the reply's own settings wrote before the loop may lead into it whatever is set then, so advice is also tried
    on the whole reply, which is what following it comes to.
    """
    params = case.query.params
    yield from _draws(case, "greedy", case.kept, SamplingParams(temperature=0, ignore_eos=params.ignore_eos), {})
    changes = advice(params)
    if changes:
        looped, _ = yield from _draws(case, "advised", case.kept, changed_params(params, changes), changes, RUNS)
        if 2 * looped[0] > looped[1] and case.begin > 0 and case.noticed <= MOST_DRAWN:
            looped, _ = yield from _draws(case, "anew", case.kept, changed_params(params, changes), changes, RUNS, 0)
        found = replace(found, advised=looped)
        if 2 * looped[0] <= looped[1]:
            return found, changes
    changes = stronger(params)
    looped, _ = yield from _draws(case, "stronger", case.kept, changed_params(params, changes), changes, RUNS)
    return found, changes if 2 * looped[0] <= looped[1] else {}


def _draws(
    case: _Case,
    name: str,
    kept: KeptAs,
    params: SamplingParams,
    changed: dict[str, Any],
    runs: int = 1,
    begin: int | None = None,
) -> Slices[tuple[tuple[int, int], list[Redrawn]]]:
    """Draw the reply's tokens anew from `begin` (None: just before the loop), with its own random numbers and then with
    others; stops once most runs agree.

    `(runs that looped, runs)` and what was drawn; the first one goes into the evidence, in place of earlier draws of
    this name.
    """
    query, runs = case.query, runs if params.temperature > 0 else 1
    begin = case.begin if begin is None else begin
    drawn: list[Redrawn] = []
    looped = 0
    for run in range(runs):
        seeded = replace(params, seed=((query.params.seed or 0) + run * SEED_STEP) % (MAX_SEED + 1))
        before, count = query.reply_ids[:begin], case.count(begin)
        one = yield from redraw(case.parts, kept, query.prompt_ids, before, seeded, count, case.is_word)
        drawn.append(one)
        looped += one.loop is not None
        if 2 * max(looped, len(drawn) - looped) > runs:
            break
    case.evidence[:] = [item for item in case.evidence if item["run"] != name]
    case.evidence.append(_evidence(case, name, drawn, looped, changed, begin))
    return (looped, len(drawn)), drawn


def _evidence(
    case: _Case, name: str, drawn: list[Redrawn], looped: int, changed: dict[str, Any], begin: int
) -> dict[str, Any]:
    first, reply = drawn[0], case.query.reply_ids[begin:]
    equal = common_prefix_len(first.token_ids, reply)
    parted = None if equal in (len(first.token_ids), len(reply)) else begin + equal
    what = {
        "fresh": "A fresh prefill with the same settings and random numbers",
        "fp32": "The same with a float32 cache",
        "fp16": "The same with an fp16 cache",
        "greedy": "The likeliest token each time",
        "advised": "The advised settings",
        "anew": "The whole reply with the advised settings",
        "stronger": "Still stronger penalties",
    }[name]
    result = "loops too" if looped == len(drawn) else "does not loop" if not looped else f"loops {looped} times"
    of = f" in {len(drawn)} runs" if len(drawn) > 1 else ""
    return {
        "run": name,
        "runs": len(drawn),
        "looped": looped,
        "loop": loop_dict(next((one.loop for one in drawn if one.loop is not None), None)),
        "from_token": begin,
        "tokens": len(first.token_ids),
        "parts_at": parted,
        "changed": changed,
        "text": case.parts.tokenizer.decode(first.token_ids),
        "sentence": f"{what}, from token {begin} of the reply on: {result}{of}.",
    }
