"""A reply that repeats itself has its session audited by itself, behind everything that somebody asks for."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.debugging import idle_audit
from engine.debugging.protocol import FaultRequest
from engine.protocol import Finished, GenerateRequest
from engine.sampling.params import SamplingParams
from tests.support.engines import RecordingEngine, run, tiny_engine
from tests.support.fake_engine import wait_until

A, B = (str(uuid.UUID(int=number)) for number in (1, 2))
IDS = tuple(torch.randint(1, 256, (60,), generator=torch.Generator().manual_seed(5)).tolist())
LOOPING, PLAIN = (65, 66) * 20, tuple(range(60, 100))


@pytest.fixture
def engine() -> Iterator[RecordingEngine]:
    engine = tiny_engine(fault_injection=True)
    yield engine
    engine.check_integrity()
    engine.close()


def turn(engine: RecordingEngine, session: str | None, prompt: tuple[int, ...], reply: tuple[int, ...]) -> Finished:
    params = SamplingParams(temperature=0, ignore_eos=True)
    last = run(engine, GenerateRequest(prompt, params, session, forced_ids=reply))[-1]
    assert isinstance(last, Finished), last
    return last


def last_audit(engine: RecordingEngine, session: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = engine.inspect(session)["audit"]
    return found


def test_a_loop_is_audited_by_itself_and_other_replies_are_not(engine):
    assert turn(engine, B, IDS, PLAIN).stats.loop is None
    assert turn(engine, A, IDS, LOOPING).stats.loop is not None
    assert wait_until(lambda: last_audit(engine, A) is not None)
    found = last_audit(engine, A)
    assert (found["scope"], found["verdict"]) == ("loop", "clean")
    assert found["checked_tokens"] == found["cache_pos"] > len(IDS)
    assert last_audit(engine, B) is None


def test_what_was_wrong_when_the_loop_was_written_is_found(engine):
    turn(engine, A, IDS, PLAIN)
    engine.inject(FaultRequest(A, "shift", 1, 20, 6, 3))
    turn(engine, A, (*IDS, *PLAIN, *IDS[:8]), LOOPING)
    assert wait_until(lambda: last_audit(engine, A) is not None)
    found = last_audit(engine, A)
    assert (found["scope"], found["verdict"]) == ("loop", "fault")
    fault = found["faults"][0]
    assert (fault["kind"], fault["first_position"], fault["last_position"]) == ("shift", 20, 25)


def test_it_gives_way_to_what_is_asked_for_and_to_the_sessions_next_turn(engine, monkeypatch):
    """Nobody waits for an audit that nobody asked for."""
    begun: list[int] = []

    def endless(*args: Any, **options: Any) -> Iterator[None]:
        while True:
            begun.append(1)
            yield

    monkeypatch.setattr(idle_audit, "audit", endless)
    jobs = engine._steps().jobs
    turn(engine, A, IDS, LOOPING)
    assert wait_until(lambda: len(begun) > 3)
    turn(engine, A, (*IDS, *LOOPING, *IDS[:8]), PLAIN)
    assert wait_until(lambda: not jobs)
    turn(engine, B, IDS, LOOPING)
    assert wait_until(lambda: bool(jobs))
    assert engine.audit(A)["scope"] == "audit" and last_audit(engine, B) is None
    assert wait_until(lambda: not jobs)


def test_it_waits_while_anybody_is_answered(engine, monkeypatch):
    slices: list[bool] = []

    def watched(loop: Any, *args: Any, **options: Any) -> Iterator[None]:
        for _ in range(3):
            slices.append(loop.scheduler.has_work)
            yield

    monkeypatch.setattr(idle_audit, "audit", watched)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=200)
    other = engine.generate(GenerateRequest(IDS[::-1], params, B))
    next(iter(other))
    turn(engine, A, IDS, LOOPING)
    assert isinstance(list(other)[-1], Finished)
    assert wait_until(lambda: len(slices) == 3)
    assert slices == [False] * 3


def test_a_long_session_is_left_to_a_person(engine, monkeypatch):
    monkeypatch.setattr(idle_audit, "MOST_TOKENS", 50)
    turn(engine, A, IDS, LOOPING)
    assert engine._call(lambda: len(engine._steps().jobs)) == 0 and last_audit(engine, A) is None
