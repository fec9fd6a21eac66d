"""Where a turn's time went: slots of steps, spans of real turns, and the nesting that trace viewers want."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.debugging.timeline import PARTS, SESSIONS, SLOTS, TURNS, StepRecord, Steps, StepTimes, Timeline, TurnTrace
from engine.debugging.trace_events import FIRST_US, trace_events
from engine.protocol import GenerateRequest, TimedSpan
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams
from tests.support.engines import ENDLESS, LONG_CONTEXT, run, tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def step_at(began: float) -> StepRecord:
    """Schedule 1, copy 2, model 3, sample 4, and 5 until the end."""
    return StepTimes(began, began + 1, began + 3, began + 6, began + 10).record(began + 15)


def spans(trace: dict[str, Any], thread: int | None = None) -> list[dict[str, Any]]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if thread is None or event["tid"] == thread]


def names(trace: dict[str, Any], thread: int | None = None) -> list[str]:
    return [event["name"] for event in spans(trace, thread)]


def assert_nested(trace: dict[str, Any]) -> None:
    """Events are what the Trace Event Format asks for, and those of a thread lie inside or beside each other.

    Perfetto reads a time as `int(1000 * us)`, which only whole numbers stand; Chrome's Performance panel skips time 0.
    """
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    named = {(event["name"], event["tid"]): event["args"]["name"] for event in metadata}
    assert named == {("process_name", 1): "KVScope", ("thread_name", 1): "caller", ("thread_name", 2): "engine"}
    for event in trace["traceEvents"]:
        assert event["ph"] in "MX" and event["pid"] == 1 and event["tid"] in (1, 2) and event["name"]
    for thread in (1, 2):
        open_ends: list[int] = []
        for event in sorted(spans(trace, thread), key=lambda item: (item["ts"], -item["dur"])):
            assert type(event["ts"]) is type(event["dur"]) is int and event["ts"] >= 1 and event["dur"] >= 0, event
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], event
            open_ends.append(end)


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_any_number_keep_their_sums_in_a_bounded_number_of_slots(seed: int) -> None:
    chance = random.Random(seed)
    capacity = chance.choice([4, 5, 16, SLOTS])
    steps, count, tokens = Steps(capacity), chance.randrange(1, 3000), 0
    kinds = [index >= count // 5 for index in range(count)]
    for index, decode in enumerate(kinds):
        steps.add(step_at(20.0 * index), decode, index, 0.5)
        tokens += index
    slots = list(steps)
    assert 1 <= len(slots) <= capacity
    assert sum(slot.steps for slot in slots) == count and sum(slot.tokens for slot in slots) == tokens
    assert sum(slot.steps for slot in slots if slot.decode) == sum(kinds)
    assert (slots[0].start, slots[-1].end) == (0.0, 20.0 * (count - 1) + 15)
    for slot, following in pairwise(slots):
        assert slot.end <= following.start
    for slot in slots:
        assert slot.parts == pytest.approx([slot.steps * seconds for seconds in (1, 2, 3, 4, 0.5)])
    if count > 2 * capacity and capacity == SLOTS:
        assert len(slots) > capacity // 3, "no more is put together than has to be"


def test_kinds_that_alternate_lose_the_oldest_rather_than_grow() -> None:
    steps = Steps(4)
    for index in range(11):
        steps.add(step_at(20.0 * index), bool(index % 2), 1, 0.0)
    slots = list(steps)
    assert len(slots) <= 4 and slots[-1].start == 200.0
    assert all(slot.end <= after.start for slot, after in pairwise(slots))


def test_only_the_last_turns_of_the_last_sessions_are_remembered() -> None:
    timeline = Timeline()
    for number in range(TURNS + 3):
        timeline.begin("a", TurnTrace(str(number)))
    assert [turn.turn_id for turn in timeline.turns("a")] == [str(number) for number in range(3, TURNS + 3)]
    for number in range(SESSIONS):
        timeline.begin(f"s{number}", TurnTrace())
        timeline.restored(f"r{number}", 0.0)
    assert timeline.turns("a") == [] and len(timeline.turns("s0")) == 1
    assert len(timeline._turns) == SESSIONS and len(timeline._restores) <= SESSIONS
    timeline.begin(None, TurnTrace())
    timeline.forget("s0")
    assert timeline.turns("s0") == [] and len(timeline._turns) == SESSIONS - 1


def test_what_is_handed_out_does_not_change_any_more() -> None:
    timeline, trace = Timeline(), TurnTrace("t")
    timeline.begin("a", trace)
    trace.step(step_at(0.0), False, 3)
    (copy,) = timeline.turns("a")
    trace.step(step_at(20.0), True, 1)
    trace.end(None)
    assert len(list(copy.steps)) == 1 and copy.ended is None


def test_a_turn_that_was_asked_for_in_the_last_step_of_another_begins_behind_it() -> None:
    """The reply's reader may be quicker than the rest of the step: the two turns' spans crossed then."""
    first, second = TurnTrace("a", -1.0), TurnTrace("b", 12.0)
    for trace, began in ((first, 0.0), (second, 20.0)):
        trace.step(step_at(began), True, 1)
        trace.ended = began + 14
    found = trace_events("s", [first, second])
    assert_nested(found)
    turns = [
        ((event["ts"] - FIRST_US) / 1e6 - 1, event["dur"] / 1e6) for event in spans(found) if event["name"] == "turn"
    ]
    assert turns == [(-1, 16), (15, 20)]


def test_the_spans_of_two_turns() -> None:
    engine, session = tiny_engine(), str(uuid.uuid4())
    now = time.perf_counter()
    request = GenerateRequest(tuple(range(40)), GREEDY, session, before=(TimedSpan("render", now - 0.25, now),))
    run(engine, request)
    run(engine, GenerateRequest((*range(40), 7, 8, 9), GREEDY, session))
    trace = engine.trace(session)
    engine.close()
    assert_nested(trace)
    json.dumps(trace, allow_nan=False)
    assert names(trace, 1) == ["render", "prepare", "prepare"]
    phases = [name for name in names(trace, 2) if name not in ("step", "queue", *PARTS)]
    assert phases == ["turn", "match", "prefill", "decode"] * 2
    first, second = (event for event in spans(trace) if event["name"] == "turn")
    assert first["args"]["turn"] == request.request_id and first["args"]["prompt_tokens"] == 40
    assert second["args"]["reused_tokens"] == 40 and second["args"]["finish_reason"] == "length"
    assert first["ts"] >= 250_000, "time begins when the first turn's prompt began to be rendered"
    prefills = [event["args"] for event in spans(trace) if event["name"] == "prefill"]
    assert [args["tokens"] for args in prefills] == [40, 3]
    decodes = [event["args"] for event in spans(trace) if event["name"] == "decode"]
    assert decodes == [{"steps": 5, "tokens": 5}] * 2, "the first token comes with the prefill"
    for name in ("model", "sample", "detokenise"):
        assert names(trace).count(name) == 12


def test_turns_that_run_together_share_steps_and_a_stateless_one_leaves_nothing() -> None:
    engine, sessions = tiny_engine(), [str(uuid.uuid4()) for _ in range(2)]
    streams = [
        engine.generate(GenerateRequest(tuple(range(n, n + 30)), replace(GREEDY, max_tokens=40), session))
        for n, session in zip((0, 50), sessions, strict=True)
    ]
    for stream in streams:
        list(stream)
    run(engine, GenerateRequest(tuple(range(20)), GREEDY))
    traces = [engine.trace(session) for session in sessions]
    unknown = engine.trace(str(uuid.uuid4()))
    engine.release(sessions[0])
    forgotten = engine.trace(sessions[0])
    engine.close()
    for trace in traces:
        assert_nested(trace)
        assert names(trace).count("turn") == 1
        assert sum(e["args"]["tokens"] for e in spans(trace) if e["name"] in ("prefill", "decode")) == 30 + 39
    assert spans(unknown) == spans(forgotten) == []


def test_a_trace_can_be_read_while_the_turn_runs_and_is_stopped() -> None:
    engine, session = tiny_engine(context=LONG_CONTEXT), str(uuid.uuid4())
    stream = engine.generate(GenerateRequest(tuple(range(30)), ENDLESS, session))
    events = iter(stream)
    for _ in range(5):
        next(events)
    running = engine.trace(session)
    assert_nested(running)
    (turn,) = (event for event in spans(running) if event["name"] == "turn")
    assert "finish_reason" not in turn["args"] and "decode" in names(running)
    stream.cancel()
    reader = threading.Thread(target=lambda: list(events))
    reader.start()
    reader.join(30)
    (turn,) = (event for event in spans(engine.trace(session)) if event["name"] == "turn")
    engine.close()
    assert turn["args"]["finish_reason"] == "cancelled"


def test_tokens_that_were_guessed_ahead_count_as_what_they_became() -> None:
    engine, session = tiny_engine(speculation="on"), str(uuid.uuid4())
    run(engine, GenerateRequest((5, 6, 7, 8) * 8, replace(GREEDY, max_tokens=60), session))
    trace = engine.trace(session)
    engine.close()
    assert_nested(trace)
    (decode,) = (event["args"] for event in spans(trace) if event["name"] == "decode")
    assert decode["tokens"] == 59 > decode["steps"]


def test_beams_count_as_one_turn() -> None:
    engine, session = tiny_engine(), str(uuid.uuid4())
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    run(engine, GenerateRequest(tuple(range(20)), params, session, beams=BeamParams(num_beams=3)))
    trace = engine.trace(session)
    engine.close()
    assert_nested(trace)
    assert names(trace).count("turn") == 1
    (decode,) = (event["args"] for event in spans(trace) if event["name"] == "decode")
    assert decode["tokens"] == decode["steps"] == 4, "however many beams are run"


def test_a_session_that_is_read_from_disk_shows_it(tmp_path: Path) -> None:
    session, ids = str(uuid.uuid4()), tuple(range(48))
    options: dict[str, Any] = {"data_dir": tmp_path, "snapshot_limit": 2**26}
    engine = tiny_engine(**options)
    run(engine, GenerateRequest(ids, GREEDY, session))
    engine.close()
    engine = tiny_engine(**options)
    run(engine, GenerateRequest((*ids, 5), GREEDY, session))
    run(engine, GenerateRequest((*ids, 5, 6), GREEDY, session))
    trace = engine.trace(session)
    engine.close()
    assert_nested(trace)
    assert names(trace, 1) == ["restore", "prepare"], "read and verified on the caller's thread, once"
    assert names(trace, 2).count("restore") == 1 and names(trace, 2).index("restore") < names(trace, 2).index("match")


def test_a_card_s_parts_are_named_for_what_the_host_does() -> None:
    trace = TurnTrace("t", 0.0)
    trace.step(step_at(0.0), False, 3)
    trace.end(None)
    assert [name for name in names(trace_events("s", [trace], on_card=True)) if name in ("model", "launch")] == [
        "launch"
    ]
