"""One reply that loops, and what it is run again with: draws from just before the loop on, and what each one shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.debugging.loops import MAX_PERIOD, REPEATS, LoopDetector
from engine.debugging.protocol import DiagnoseQuery
from engine.debugging.replays import KeptAs, Redrawn, redraw
from engine.debugging.verdict import loop_dict
from engine.jobs import Slices
from engine.kv_cache.prefixes import common_prefix_len
from engine.loader import EngineParts
from engine.protocol import Loop
from engine.sampling.params import MAX_SEED, SamplingParams

RUNS = 5
"""Draws with other random numbers, side by side, where there is chance in it."""
SEED_STEP = 1_000_003
MOST_DRAWN = 384
LEAST_DRAWN = REPEATS * MAX_PERIOD
WHAT = {
    "fresh": "A fresh prefill with the same settings and random numbers",
    "fp32": "The same with a float32 cache",
    "fresh_anew": "The whole reply with the same settings",
    "fp32_anew": "The whole reply with a float32 cache",
    "fp16": "The same with an fp16 cache",
    "greedy": "The likeliest token each time",
    "advised": "The advised settings",
    "anew": "The whole reply with the advised settings",
    "stronger": "Still stronger penalties",
}


@dataclass(slots=True)
class LoopCase:
    """One reply that loops, what it is run again with, and the evidence so far. `noticed`: tokens of it until the loop
    was seen; `kept`: how its own session keeps K and V."""

    parts: EngineParts
    query: DiagnoseQuery
    loop: Loop
    noticed: int
    kept: KeptAs
    is_word: Callable[[int], bool]
    evidence: list[dict[str, Any]] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """The reply's first token that is drawn anew; a near-loop is noticed late, so one begins a period earlier."""
        return max(self.loop.start - (MAX_PERIOD if self.loop.near else 0), 0)

    def count(self, begin: int) -> int:
        """Tokens to draw from `begin` on: twice what the reply took, so that another loop has the time to show."""
        return self._drawn(begin, 2 * (self.noticed - begin))

    def as_long(self, begin: int) -> int:
        """Tokens to draw from `begin` on where rates are compared: as many as the reply has, for given longer, most
        replies loop some time."""
        return self._drawn(begin, len(self.query.reply_ids) - begin)

    def _drawn(self, begin: int, wanted: int) -> int:
        wanted = min(max(wanted, LEAST_DRAWN), MOST_DRAWN)
        room = self.parts.max_seq_len - len(self.query.prompt_ids) - begin
        return max(min(wanted, room, self.query.max_tokens or wanted), 1)


def noticed_after(reply: Sequence[int], loop: Loop, is_word: Callable[[int], bool]) -> int:
    """How many tokens of the reply it took to see the loop."""
    detector = LoopDetector(is_word)
    for count, token_id in enumerate(reply, start=1):
        found = detector.push(token_id)
        if found is not None and found.period == loop.period and found.start == loop.start:
            return count
    return len(reply)


def draws(
    case: LoopCase,
    name: str,
    kept: KeptAs,
    params: SamplingParams,
    changed: dict[str, Any],
    runs: int = 1,
    begin: int | None = None,
    count: int | None = None,
) -> Slices[tuple[tuple[int, int], list[Redrawn]]]:
    """Draw the reply's tokens anew from `begin` (None: just before the loop), with its own random numbers and then with
    others; stops once most runs agree.

    `(runs that looped, runs)` and what was drawn; the first one goes into the evidence, in place of earlier draws of
    this name.
    """
    query, runs = case.query, runs if params.temperature > 0 else 1
    begin = case.begin if begin is None else begin
    seeds = [((query.params.seed or 0) + run * SEED_STEP) % (MAX_SEED + 1) for run in range(runs)]
    settings = [replace(params, seed=seed) for seed in seeds]
    before, count = query.reply_ids[:begin], count or case.count(begin)
    drawn = yield from redraw(case.parts, kept, query.prompt_ids, before, settings, count, case.is_word)
    looped = sum(one.loop is not None for one in drawn)
    case.evidence[:] = [item for item in case.evidence if item["run"] != name]
    case.evidence.append(_evidence(case, name, drawn, looped, changed, begin))
    return (looped, len(drawn)), drawn


def _evidence(
    case: LoopCase, name: str, drawn: list[Redrawn], looped: int, changed: dict[str, Any], begin: int
) -> dict[str, Any]:
    first, reply = drawn[0], case.query.reply_ids[begin:]
    equal = common_prefix_len(first.token_ids, reply)
    parted = None if equal in (len(first.token_ids), len(reply)) else begin + equal
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
        "sentence": f"{WHAT[name]}, from token {begin} of the reply on: {result}{of}.",
    }
