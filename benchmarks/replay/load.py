"""Recorded sessions as load: all at once, each turn when it was asked for, prompts and replies as they were.

Replies are given rather than drawn, so that every replay has the same work and the next prompt finds the same cache; no
tokens are guessed ahead then.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.replay.files import RecordedSession, RecordedTurn
from benchmarks.replay.rerun import replay_params
from engine.errors import KVScopeError
from engine.local import LocalEngine
from engine.protocol import Failed, Finished, GenerateRequest, TokenDelta, TurnStats


@dataclass(frozen=True, slots=True)
class Arrival:
    """A turn, of which session, and at which second of the replay it is asked for at the earliest."""

    session: int
    turn: RecordedTurn
    at: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds since the replay began; `stats` is None for a turn that failed."""

    arrival: Arrival
    asked: float
    first_token: float | None
    ended: float
    stats: TurnStats | None
    error: str | None = None


def arrivals(sessions: Sequence[RecordedSession], speed: float, max_gap_s: float) -> list[Arrival]:
    """Recorded gaps between any two turns that follow each other, cut to `max_gap_s` and divided by `speed`."""
    turns = [(turn.asked, index, turn) for index, session in enumerate(sessions) for turn in session.usable]
    turns.sort(key=lambda item: (item[0], item[1], item[2].number))
    found, at = [], 0.0
    for place, (asked, session, turn) in enumerate(turns):
        if place:
            at += min(max(asked - turns[place - 1][0], 0.0), max_gap_s) / speed
        found.append(Arrival(session, turn, at))
    return found


def play(engine: LocalEngine, todo: Sequence[Arrival]) -> list[Answer]:
    """Ask for all turns, each when it is due and the turn before in its session is over; one thread per session."""
    answers: list[Answer] = []
    began = time.perf_counter()

    def one_session(mine: Sequence[Arrival]) -> None:
        session_id = str(uuid.uuid4())
        for arrival in mine:
            time.sleep(max(0.0, began + arrival.at - time.perf_counter()))
            answers.append(_ask(engine, session_id, arrival, began))

    sessions = sorted({arrival.session for arrival in todo})
    threads = [
        threading.Thread(target=one_session, args=([item for item in todo if item.session == session],))
        for session in sessions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _ask(engine: LocalEngine, session_id: str, arrival: Arrival, began: float) -> Answer:
    turn, asked, first = arrival.turn, time.perf_counter(), None
    params = replace(replay_params(engine, turn), max_tokens=max(len(turn.reply_ids), 1), stop=(), ignore_eos=True)
    forced = None if turn.beams.searches else turn.reply_ids or None
    request = GenerateRequest(turn.prompt_ids, params, session_id, forced_ids=forced, beams=turn.beams)
    error: str | None = None
    stats: TurnStats | None = None
    try:
        for event in engine.generate(request):
            if first is None and isinstance(event, TokenDelta | Finished):
                first = time.perf_counter()
            if isinstance(event, Finished):
                stats = event.stats
            elif isinstance(event, Failed):
                error = str(event.error)
    except KVScopeError as refusal:
        error = str(refusal)
    return Answer(
        arrival, asked - began, None if first is None else first - began, time.perf_counter() - began, stats, error
    )


def report(answers: Sequence[Answer]) -> dict[str, Any]:
    """What came of it, beside what was recorded; times in milliseconds."""
    done = [(answer, answer.stats) for answer in answers if answer.stats is not None]
    turns = [answer.arrival.turn for answer, _ in done]
    waits = [1e3 * (answer.first_token - answer.asked) for answer, _ in done if answer.first_token is not None]
    recorded = [value for turn in turns if isinstance(value := turn.stats.get("ttft_ms"), int | float)]
    wall = max((answer.ended for answer in answers), default=0.0)
    generated = sum(stats.generated_tokens for _, stats in done)
    computed = sum(stats.computed_tokens for _, stats in done)
    prompt = sum(stats.prompt_tokens for _, stats in done)
    result: dict[str, Any] = {
        "sessions": len({answer.arrival.session for answer in answers}),
        "turns": len(answers),
        "failed": len(answers) - len(done),
        "seconds": round(wall, 3),
        "generated_tokens": generated,
        "computed_tokens": computed,
        "tokens_per_s": round(generated / wall, 3) if wall else None,
        "ttft_ms": percentiles(waits),
        "recorded_ttft_ms": percentiles(recorded),
        "hit_rate": _rate(sum(stats.reused_tokens for _, stats in done), prompt),
        "recorded_hit_rate": _recorded_rate(turns),
        "late_s": round(max((answer.asked - answer.arrival.at for answer in answers), default=0.0), 3),
    }
    then, now = result["recorded_ttft_ms"]["p50"], result["ttft_ms"]["p50"]
    return {**result, "ttft_ratio": round(now / then, 3) if then and now is not None else None}


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The value below which so many of a hundred lie, by rank."""
    ordered = sorted(values)
    at = {f"p{share}": min(len(ordered) - 1, len(ordered) * share // 100) for share in (50, 90, 99)}
    return {name: round(ordered[index], 3) if ordered else None for name, index in at.items()}


def _rate(reused: int, prompt: int) -> float | None:
    return round(reused / prompt, 4) if prompt else None


def _recorded_rate(turns: Sequence[RecordedTurn]) -> float | None:
    known = [turn for turn in turns if type(turn.stats.get("reused_tokens")) is int]
    return _rate(sum(turn.stats["reused_tokens"] for turn in known), sum(len(turn.prompt_ids) for turn in known))
