"""The invariant lights: each turns red for its fault, names it in a sentence, and costs next to nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.debugging.invariants import InvariantLights, invariants
from engine.debugging.protocol import FaultRequest
from engine.protocol import Failed, GenerateRequest, TokenDelta
from engine.sampling.params import SamplingParams
from engine.scheduler import ScheduledBatch, ScheduledItem
from engine.sequence import Sequence, Status
from tests.support.engines import ENDLESS, LONG_CONTEXT, RecordingEngine, run, tiny_engine

SIZE = 4
A = str(uuid.UUID(int=1))
IDS = tuple(torch.randint(1, 256, (40,), generator=torch.Generator().manual_seed(5)).tolist())
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[RecordingEngine]:
    engine = tiny_engine(block_size=SIZE, fault_injection=True, context=LONG_CONTEXT)
    yield engine
    engine.close()


def broken_by(engine: RecordingEngine, fault: Callable[[Sequence], None]) -> tuple[str | None, set[str]]:
    """Do something to a running sequence: the sentence in the turn's numbers, and the lights that are out after it."""
    stream = engine.generate(GenerateRequest(IDS, ENDLESS, A))
    done, violation = False, None
    for event in stream:
        if isinstance(event, TokenDelta) and not done:
            engine._call(lambda: fault(engine._steps().scheduler.find(A)))
            done = True
        violation = violation or (event.stats.violation if event.stats else None)
        if violation:
            stream.cancel()
    report = engine.inspect(A)
    return violation, {name for name, holds in report["invariants"].items() if not holds}


def test_nothing_is_wrong_with_a_chat_and_its_acts(engine):
    session = GenerateRequest(IDS, LONG, A)
    events = run(engine, session)
    events += run(engine, GenerateRequest((*IDS, 1, 2, 3), LONG, A))
    events += run(engine, GenerateRequest((*IDS[:20], 9), LONG, A, cause="edit"))
    assert all(event.stats.violation is None for event in events)
    report = engine.inspect(A)
    assert all(report["invariants"].values()) and report["violation"] is None
    names = {"cache_length_is_tokens_run", "cached_ids_are_history", "next_position_is_length", "no_position_twice",
             "written_block_has_one_owner", "last_token_run_or_pending", "values_finite"}  # fmt: skip
    assert names <= set(report["invariants"])


def test_a_cache_that_is_longer_than_what_was_run_is_told(engine):
    def skip(sequence: Sequence) -> None:
        sequence.token_ids.append(1)
        sequence.cache_pos += 1

    sentence, out = broken_by(engine, skip)
    assert sentence is not None and "tokens, but" in sentence and "cache_length_is_tokens_run" in out


def test_values_that_are_not_finite_are_told(engine):
    run(engine, GenerateRequest(IDS, LONG, A))
    engine.inject(FaultRequest(A, "nan", 0, 3, 2))
    last = run(engine, GenerateRequest((*engine.inspect(A)["token_ids"], 5, 6), LONG, A))[-1]
    assert isinstance(last, Failed)
    report = engine.inspect(A)
    assert report["invariants"]["values_finite"] is False and "not finite" in report["violation"]
    engine.repair(A)
    assert all(engine.inspect(A)["invariants"].values())


@pytest.fixture
def running(engine) -> Iterator[Sequence]:
    """A sequence of 41 tokens, the last of which is about to be run into a fresh block; no turn knows of it."""
    sequence = Sequence(engine._steps().prefix_cache, A)
    sequence.set_tokens((*IDS, 7))
    sequence.status = Status.RUNNING
    sequence.reserve(len(IDS) + 1)
    sequence.advance(len(IDS))
    yield sequence
    sequence.status = Status.IDLE
    sequence.release_blocks()


def names(lights: InvariantLights, *sequences: Sequence) -> list[str]:
    """What a look at a decode step of these sequences finds."""
    batch = ScheduledBatch(tuple(ScheduledItem(one, one.cache_pos, 1, True) for one in sequences))
    return [violation.name for _, violation in lights.before(batch)]


def test_each_light_of_a_step_names_its_fault(engine, running):
    cache = engine._steps().prefix_cache
    lights = InvariantLights(cache)
    assert names(lights, running) == []
    cache.pool.add_ref(running.block_table[-1])
    assert names(lights, running) == ["written_block_has_one_owner"]
    assert not invariants(cache, InvariantLights(cache), running)["written_block_has_one_owner"]
    cache.pool.release(running.block_table[-1])
    table = running.block_table
    running.blocks.tables[0] = [table[1], *table[1:]]
    assert names(lights, running) == ["no_position_twice"]
    running.blocks.tables[0] = table[:-1]
    assert names(lights, running) == ["cache_pos_within_blocks"]
    running.blocks.tables[0] = table
    later = ScheduledBatch((ScheduledItem(running, running.cache_pos + 1, 1, True),))
    assert [violation.name for _, violation in lights.before(later)] == ["next_position_is_length"]


def test_two_sequences_that_write_one_block_are_told(engine, running):
    other = Sequence(engine._steps().prefix_cache, "other")
    other.token_ids, other.cache_pos = running.token_ids, running.cache_pos
    other.blocks.tables[0] = running.block_table
    assert names(InvariantLights(engine._steps().prefix_cache), running, other) == ["written_block_has_one_owner"]


def test_ids_other_than_the_history_are_told(engine, running):
    cache = engine._steps().prefix_cache
    lights = InvariantLights(cache)
    batch = ScheduledBatch((ScheduledItem(running, 0, len(IDS), False),))
    assert lights.after(batch, [True]) == []
    running.token_ids[-2] += 1
    [(_, violation)] = lights.after(batch, [True])
    assert violation.name == "cached_ids_are_history"
    assert not invariants(cache, InvariantLights(cache), running)["cached_ids_are_history"]
    running.token_ids[-2] -= 1
    running.token_ids.append(8)
    waiting = ScheduledBatch((ScheduledItem(running, len(IDS) - 1, 1, True),))
    assert [violation.name for _, violation in lights.after(waiting, [True])] == ["last_token_run_or_pending"]


def test_the_first_violation_stays_until_the_next_turn(engine, running):
    cache = engine._steps().prefix_cache
    lights = InvariantLights(cache)
    step = ScheduledBatch((ScheduledItem(running, len(IDS) - 1, 1, True),))
    lights.after(step, [False])
    running.token_ids += [8, 9]
    lights.after(step, [True])
    first = lights.first(A)
    assert first is not None and first.name == "values_finite" and f"position {len(IDS) - 1}" in first.sentence
    assert invariants(cache, lights, running)["values_finite"] is False
    lights.begin(running)
    assert lights.first(A) is None and invariants(cache, lights, running)["values_finite"]


def decode_work(length: int) -> int:
    """Comparisons of 64 decode steps of a sequence of this length, one of which begins a block every `SIZE`."""
    engine = tiny_engine(block_size=16, context=2048)
    try:
        steps = engine._steps()
        sequence = Sequence(steps.prefix_cache, A)
        sequence.set_tokens([7] * (length + 64))
        sequence.status = Status.RUNNING
        sequence.reserve(length + 64)
        sequence.advance(length)
        lights = InvariantLights(steps.prefix_cache)
        for position in range(length, length + 64):
            batch = ScheduledBatch((ScheduledItem(sequence, position, 1, False),))
            assert lights.before(batch) == []
            sequence.advance(1)
            assert lights.after(batch, [True]) == []
        return lights.comparisons
    finally:
        engine.close()


def test_a_step_costs_a_few_comparisons_whatever_the_length():
    short, long = decode_work(32), decode_work(1600)
    assert short <= 64 * 12
    assert long - short <= 4 * 2 * (1600 // 16)  # once per block that is begun, the table is looked through
