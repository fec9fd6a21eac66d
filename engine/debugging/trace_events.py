"""The timeline of a session in the Trace Event Format that Perfetto and Chrome read: `traceEvents`, times in µs.

Events of one thread are complete ("X") and lie wholly inside each other, as these viewers want them: turn, phase, step
and part on the engine's thread, what was done before on the caller's. Times are whole numbers: Perfetto cuts fractions
off after it has multiplied them, so that an end of 0.1 µs could come to lie behind that of what is around it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from engine.debugging.timeline import PARTS, Slot, TurnTrace

PROCESS, CALLER, ENGINE = 1, 1, 2
THREADS = {CALLER: "caller", ENGINE: "engine"}
CARD_PARTS = ("schedule", "copy", "launch", "device", "detokenise")
"""`PARTS` where the host only launches what a card computes, and then waits for the sampled ids."""
SHOWN_STATS = ("prompt_tokens", "reused_tokens", "computed_tokens", "generated_tokens", "finish_reason", "cache_pos")
FIRST_US = 1
"""Where time begins: Chrome's Performance panel takes 0 for no time at all."""
LEAST_S = 5e-7
"""What is shorter is left out."""

Event = dict[str, Any]


def trace_events(session_id: str, turns: Sequence[TurnTrace], on_card: bool = False) -> dict[str, Any]:
    """The body of `GET /api/sessions/{id}/trace`; time `FIRST_US` is the beginning of the first turn, `started_at` the
    wall clock at time 0, in seconds."""
    now = time.perf_counter()
    origin = min((_began(turn) for turn in turns), default=now) - FIRST_US / 1e6
    events = [_named("process_name", "KVScope", CALLER)]
    events += [_named("thread_name", name, thread) for thread, name in THREADS.items()]
    writer = _Writer(origin, CARD_PARTS if on_card else PARTS)
    for turn in turns:
        events += writer.turn(turn, now)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"session_id": session_id, "started_at": time.time() - (now - origin)},
    }


def _began(turn: TurnTrace) -> float:
    return min([turn.submitted, *(span.start for span in turn.before)])


def _named(what: str, name: str, thread: int) -> Event:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "args": {"name": name}}


class _Writer:
    def __init__(self, origin: float, parts: Sequence[str]) -> None:
        self._origin = self._free = origin
        self._parts = parts

    def turn(self, turn: TurnTrace, now: float) -> Iterator[Event]:
        """A turn that is not over reaches to `now`. One that was asked for before the engine had come to the end of the
        last step of the turn before it begins there, since events of a thread must not cross."""
        submitted = max(turn.submitted, self._free)
        for span in turn.before:
            yield self._event(span.name, span.start, span.end, CALLER, turn=turn.turn_id)
        slots = list(turn.steps)
        end = self._free = max([turn.ended or now, *(slot.end for slot in slots)])
        stats = {} if turn.stats is None else {name: getattr(turn.stats, name) for name in SHOWN_STATS}
        yield self._event("turn", submitted, end, ENGINE, turn=turn.turn_id, **stats)
        yield from self._before_first_step(turn, submitted, slots[0].start if slots else end)
        for decode, group in groupby(slots, key=lambda slot: slot.decode):
            yield from self._phase("decode" if decode else "prefill", list(group))

    def _before_first_step(self, turn: TurnTrace, submitted: float, first: float) -> Iterator[Event]:
        """What the engine did until then, and the waiting between."""
        at = max([submitted, *(span.end for span in turn.before)])
        for span in turn.preparing:
            yield from self._queue(at, span.start)
            yield self._event(span.name, span.start, span.end, ENGINE)
            at = span.end
        yield from self._queue(at, first)

    def _queue(self, start: float, end: float) -> Iterator[Event]:
        if end - start >= LEAST_S:
            yield self._event("queue", start, end, ENGINE)

    def _phase(self, name: str, slots: Sequence[Slot]) -> Iterator[Event]:
        steps, tokens = sum(slot.steps for slot in slots), sum(slot.tokens for slot in slots)
        yield self._event(name, slots[0].start, slots[-1].end, ENGINE, steps=steps, tokens=tokens)
        for slot in slots:
            name = "step" if slot.steps == 1 else "steps"
            yield self._event(name, slot.start, slot.end, ENGINE, steps=slot.steps, tokens=slot.tokens)
            at = slot.start
            # Of several steps the parts are sums, drawn one after another.
            for part, seconds in zip(self._parts, slot.parts, strict=True):
                if seconds >= LEAST_S:
                    yield self._event(part, at, min(at + seconds, slot.end), ENGINE)
                    at += seconds

    def _event(self, name: str, start: float, end: float, thread: int, **args: Any) -> Event:
        # Both ends are rounded, not the duration: what lies inside stays inside.
        first, last = (round(1e6 * (moment - self._origin)) for moment in (start, end))
        event = {"ph": "X", "name": name, "cat": "turn", "pid": PROCESS, "tid": thread}
        event |= {"ts": first, "dur": last - first}
        return {**event, "args": args} if args else event
