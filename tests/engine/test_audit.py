"""Audit, repair and damage on purpose: faults are found and named, nobody else is touched, and repair is a cure."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.faults import BAMBA, QWEN2, random_fault, run_all, summary
from engine.debugging.faults import KINDS
from engine.debugging.protocol import FaultRequest
from engine.errors import Conflict, Forbidden, InvalidRequest, Stopped
from engine.protocol import Finished, GenerateRequest
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from tests.support.engines import ENDLESS, LONG_CONTEXT, RecordingEngine, run, tiny_engine
from tests.support.fake_engine import wait_until

BLOCK = 4
A, B = (str(uuid.UUID(int=number)) for number in (1, 2))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
IDS = tuple(torch.randint(1, 256, (70,), generator=torch.Generator().manual_seed(5)).tolist())
REPLY = IDS[50:60]


@pytest.fixture
def engine(request) -> Iterator[RecordingEngine]:
    """`request.param`, where a test has one, is its context."""
    engine = tiny_engine(block_size=BLOCK, fault_injection=True, context=getattr(request, "param", 512))
    yield engine
    engine.check_integrity()
    engine.close()


def turn(engine: RecordingEngine, session: str | None, prompt: tuple[int, ...] = IDS, **request: Any) -> Finished:
    last = run(engine, GenerateRequest(prompt, GREEDY, session, **request))[-1]
    assert isinstance(last, Finished), last
    return last


def sequence(engine: RecordingEngine, session: str) -> Sequence:
    found = engine._steps().scheduler.find(session)
    assert found is not None
    return found


def places(told: dict[str, Any]) -> list[tuple[str, list[int], int, int]]:
    return [(f["kind"], f["layers"], f["first_position"], f["last_position"]) for f in told["faults"]]


def test_random_damage_is_found_and_named_and_clean_chats_raise_no_alarm(tmp_path):
    cases = list(run_all(42, 24, 7, tmp_path, {QWEN2: 0.7, BAMBA: 0.3}, 90))
    wrong = [case for case in cases if case.found != case.kind]
    told = summary(cases)
    assert told["faults"] >= 40 and told["clean"] >= 20
    assert told["detected"] >= 0.99 and told["kind_right"] >= 0.95 and told["place_right"] >= 0.95, wrong
    assert told["false_alarms"] == 0, wrong


@pytest.mark.parametrize("kind", ["llama", "llama-yarn", "qwen3", "bamba", "mamba2"])
@pytest.mark.parametrize("kv_format", ["fp32", "int4"])
def test_a_clean_chat_is_clean_in_every_architecture(kind, kv_format):
    engine = tiny_engine(block_size=BLOCK, kind=kind, kv_format=kv_format)
    try:
        history = (*IDS, *turn(engine, A, forced_ids=REPLY).token_ids)
        turn(engine, A, (*history, *IDS[:9]))
        turn(engine, A, (*IDS[:30], *IDS[10:20]), cause="edit")
        told = engine.audit(A)
        engine.check_integrity()
    finally:
        engine.close()
    assert told["verdict"] == "clean" and not told["faults"] and told["checked_tokens"] == told["cache_pos"] > 40
    assert told["logits_error"] < 1e-3 and (told["state_error"] is None) == (kind not in ("bamba", "mamba2"))
    assert len(told["heat"]["columns"]) <= 64 and len(told["heat"]["values"]) == engine_layers(kind)


def engine_layers(kind: str) -> int:
    return 0 if kind == "mamba2" else 2


def test_the_answer_names_kind_layer_place_and_turn(engine):
    first = turn(engine, A, forced_ids=REPLY)
    written = engine.requests[-1].request_id
    turn(engine, A, (*IDS, *first.token_ids, *IDS[:20]))
    done = engine.inject(FaultRequest(A, "shift", 1, 41, 6, 3))
    told = engine.audit(A)
    assert (done["start"], done["count"], done["layers"]) == (41, 6, [1])
    assert places(told) == [("shift", [1], 41, 46)] and told["faults"][0]["amount"] == 3
    assert told["since_turn"] == written and "3 positions earlier" in told["sentence"]
    assert told["verdict"] == "fault" and told["max_error"] > 0.5 > 1e-3 > told["noise_floor"]
    hot = [[value > 1 for value in row] for row in told["heat"]["values"]]
    columns = told["heat"]["columns"]
    assert not any(hot[0])
    assert [c for c, is_hot in zip(columns, hot[1], strict=True) if is_hot] == [
        c for c in columns if c[1] >= 41 and c[0] <= 46
    ]


def test_what_is_not_finite_is_a_fault_and_valid_in_the_answer(engine):
    turn(engine, A)
    engine.inject(FaultRequest(A, "nan", 0, 10, 2))
    told = engine.audit(A)
    assert places(told) == [("nan", [0], 10, 11)] and math.isnan(told["faults"][0]["max_error"])
    assert None in told["heat"]["values"][0] and told["max_error"] == math.inf


def test_damage_in_all_layers_is_one_fault_and_two_places_are_two(engine):
    turn(engine, A)
    engine.inject(FaultRequest(A, "scale", None, 20, 4, 2.0))
    engine.inject(FaultRequest(A, "overwrite", 0, 60, 2))
    assert places(engine.audit(A)) == [("scale", [0, 1], 20, 23), ("overwrite", [0], 60, 61)]


def test_stale_rows_are_those_of_the_ids_before_a_real_edit(engine):
    turn(engine, A)
    edited = (*IDS[:30], *reversed(IDS[30:]))
    turn(engine, A, edited, cause="edit")
    engine.inject(FaultRequest(A, "stale", 1, 40, 8))
    assert places(engine.audit(A)) == [("stale", [1], 40, 47)]
    steps = engine._steps()
    assert steps.records.earlier(A, edited)[0][: len(IDS)] == IDS
    steps.records.forget(A)  # without the old ids nothing tells where the rows came from
    assert places(engine.audit(A)) == [("overwrite", [1], 40, 47)]


def test_only_positions_that_were_asked_for_are_looked_at(engine):
    turn(engine, A)
    engine.inject(FaultRequest(A, "scale", 0, 40, 2))
    assert engine.audit(A, [1, 2, 39])["verdict"] == "clean"
    assert engine.audit(A, [1, 41])["faults"][0]["first_position"] == 41
    assert engine.audit(A, 5)["checked_tokens"] == 5
    for wrong in (0, [], [-1], [500]):
        with pytest.raises(InvalidRequest):
            engine.audit(A, wrong)


def test_replies_that_follow_a_fault_are_told_apart_from_it(engine):
    """What a damaged prefix made the model compute is wrong too, but the fault is where it began."""
    history = (*IDS, *turn(engine, A, forced_ids=REPLY).token_ids)
    engine.inject(FaultRequest(A, "overwrite", 0, 8, 8))
    turn(engine, A, (*history, *IDS[:20]), forced_ids=REPLY)
    told = engine.audit(A)
    assert places(told) == [("overwrite", [0], 8, 15)]
    assert [(f["layer"], f["first_position"]) for f in told["follows"]] == [(1, sequence_start(history))]


def sequence_start(history: tuple[int, ...]) -> int:
    """The first position that was computed behind the damage: all but the last token of a turn is cached."""
    return len(history) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_the_sessions_own_and_nobody_can_take_it_over(engine, kind):
    history = (*IDS, *turn(engine, A, forced_ids=REPLY).token_ids)
    turn(engine, B, (*history[:60], 7, 8))
    engine.inject(FaultRequest(A, kind, 0, 13, 20))
    assert engine.audit(A)["verdict"] == "fault" and engine.audit(B)["verdict"] == "clean"
    engine.check_integrity()
    if kind != "nan":  # with it no reply can be made
        turn(engine, A, (*history, *IDS[:10]), forced_ids=REPLY)
    engine.fork(A, "fork", history)
    fresh = turn(engine, None, (*history, *IDS[:10]))
    turn(engine, "new", (*history, *IDS[:10]))
    engine.check_integrity()
    assert engine.audit("new")["verdict"] == engine.audit("fork")["verdict"] == "clean"
    clean = tiny_engine(block_size=BLOCK)
    assert turn(clean, None, (*history, *IDS[:10])).token_ids == fresh.token_ids
    clean.close()


def test_a_damaged_chat_is_not_kept_on_disk(tmp_path):
    def start() -> RecordingEngine:
        return tiny_engine(block_size=BLOCK, fault_injection=True, data_dir=tmp_path, snapshot_limit=2**24)

    engine = start()
    history = (*IDS, *turn(engine, A, forced_ids=REPLY).token_ids)
    engine.inject(FaultRequest(A, "scale", None, 0, 60))
    turn(engine, A, (*history, *IDS[:10]), forced_ids=REPLY)
    engine.close()
    engine = start()
    try:
        assert engine.restore(A) == len(history) - 1  # what was cached before the damage
        assert engine.audit(A)["verdict"] == "clean"
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["llama", "bamba"])
def test_repair_cuts_before_the_fault_and_computes_the_rest(kind):
    engine = tiny_engine(block_size=BLOCK, fault_injection=True, kind=kind)
    try:
        turn(engine, A, forced_ids=REPLY)
        before = engine.inspect(A)
        engine.inject(FaultRequest(A, "overwrite", 1, 30, 9))
        told = engine.repair(A)
        after = engine.inspect(A)
        assert told["first_position"] == 30 and told["recomputed_tokens"] >= 1
        assert told["cut_tokens"] >= before["cache_pos"] - 30
        assert after["token_ids"] == before["token_ids"] and after["cache_pos"] == before["cache_pos"]
        assert sequence(engine, A).token_ids == [*IDS, *REPLY] and all(after["invariants"].values())
        assert engine.audit(A)["verdict"] == "clean" and sequence(engine, A).private_from is None
        assert engine.repair(A)["recomputed_tokens"] == 0
        engine.check_integrity()
    finally:
        engine.close()


def test_repair_takes_damage_out_of_the_tree_for_all(engine):
    """A fault that nobody injected sits in a block that others share: new chats must not get it any more."""
    history = (*IDS, *turn(engine, A, forced_ids=REPLY).token_ids)
    turn(engine, B, (*history, *IDS[:10]))
    cache, block = engine._need_parts().cache, sequence(engine, A).block_table[5]
    assert sequence(engine, B).block_table[5] == block
    engine._call(lambda: cache._block(cache.extents, block)[1].mul_(3))
    assert engine.audit(A)["verdict"] == engine.audit(B)["verdict"] == "fault"
    engine.repair(A)
    engine.check_integrity()
    assert engine.audit(A)["verdict"] == "clean" and engine.audit(B)["verdict"] == "fault"
    turn(engine, "new", (*history, *IDS[:20]))
    assert engine.audit("new")["verdict"] == "clean"
    turn(engine, B, (*history, *IDS[:20]))
    engine.check_integrity()
    engine.repair(B)
    assert engine.audit(B)["verdict"] == "clean"


def test_blocks_tell_when_they_were_audited_until_they_change(engine):
    history = (*IDS, *turn(engine, A, forced_ids=REPLY).token_ids)
    assert engine.inspect(A)["audit"] is None
    engine.audit(A)
    assert all(block["last_audit"]["verdict"] == "clean" for block in engine.inspect(A)["blocks"])
    turn(engine, A, (*history[:40], 5, 6, 7))
    blocks = engine.inspect(A)["blocks"]
    assert [block["last_audit"] is not None for block in blocks] == [block["start"] < 40 for block in blocks]
    engine.inject(FaultRequest(A, "scale", 0, 8, 4))
    assert all(block["last_audit"] is None for block in engine.inspect(A)["blocks"])
    engine.audit(A)
    report = engine.inspect(A)
    assert [b["start"] for b in report["blocks"] if b["last_audit"]["verdict"] == "fault"] == [8]
    assert report["audit"]["verdict"] == "fault" and report["audit"]["at"] > 0


def test_the_check_after_a_restore_is_told_like_an_audit(tmp_path):
    def start() -> RecordingEngine:
        return tiny_engine(block_size=BLOCK, data_dir=tmp_path, snapshot_limit=2**24)

    engine = start()
    turn(engine, A, forced_ids=REPLY)
    engine.close()
    engine = start()
    try:
        engine.restore(A)
        report = engine.inspect(A)
        assert report["audit"]["scope"] == "restore" and report["audit"]["verdict"] == "clean"
        checked = [block["start"] for block in report["blocks"] if block["last_audit"] is not None]
        assert len(checked) == 3 and 0 in checked and report["audit"]["checked_tokens"] == 6
    finally:
        engine.close()


@pytest.mark.parametrize("engine", [LONG_CONTEXT], indirect=True)
def test_an_audit_changes_nothing_and_lets_replies_go_on(engine):
    turn(engine, A, forced_ids=REPLY)
    table, used = list(sequence(engine, A).block_table), engine.metrics()["blocks_used"]
    stream = engine.generate(GenerateRequest(IDS[:20], ENDLESS, B))
    assert wait_until(lambda: engine.metrics()["running"] == 1)
    assert engine.audit(A)["verdict"] == "clean"
    with pytest.raises(Conflict):
        engine.audit(B)
    stream.cancel()
    list(stream)
    engine.release(B)
    assert sequence(engine, A).block_table == table and engine.metrics()["blocks_used"] == used


@pytest.mark.parametrize(
    "change",
    [{"kind": "other"}, {"layer": 2}, {"layer": -1}, {"start": -1}, {"count": 0}, {"start": 60, "count": 40},
     {"amount": 0.5}, {"amount": 0}, {"amount": 1000}, {"amount": math.inf}, {"session_id": B}],
    ids=str,
)  # fmt: skip
def test_damage_that_makes_no_sense_is_refused(engine, change):
    turn(engine, A)
    with pytest.raises(InvalidRequest):
        engine.inject(FaultRequest(**{"session_id": A, "kind": "shift", **change}))
    assert engine.audit(A)["verdict"] == "clean"


def test_damage_needs_permission():
    engine = tiny_engine(block_size=BLOCK)
    try:
        turn(engine, A)
        with pytest.raises(Forbidden, match="--allow-fault-injection"):
            engine.inject(FaultRequest(A, "nan"))
    finally:
        engine.close()


def test_random_faults_are_within_what_is_cached(engine):
    turn(engine, A)
    for kind in KINDS:
        fault = random_fault(engine, A, kind, random.Random(3))
        assert fault.start + fault.count <= engine.inspect(A)["cache_pos"]


def test_without_a_free_block_for_the_copy_nothing_is_damaged():
    engine = tiny_engine(block_size=BLOCK, fault_injection=True, blocks=21)
    try:
        turn(engine, A, IDS[:60], forced_ids=REPLY)  # 69 cached tokens: 18 of 20 blocks
        turn(engine, A, (*IDS[:60], *REPLY, *IDS[:6]), forced_ids=REPLY[:4])
        assert engine.metrics()["blocks_free"] == 0
        with pytest.raises(Conflict, match="no free block"):
            engine.inject(FaultRequest(A, "scale", 0, 0, 20))
        assert sequence(engine, A).private_from is None and engine.inspect(A)["cache_pos"] == 79
    finally:
        engine.check_integrity()
        engine.close()


def test_an_audit_can_be_stopped_and_leaves_nothing_behind(engine):
    turn(engine, A)
    before, asked = engine.inspect(A), []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) == 3

    with pytest.raises(Stopped, match="audit was stopped"):
        engine.audit(A, cancelled=cancelled)
    with pytest.raises(Stopped):
        engine.repair(A, cancelled=lambda: True)
    assert len(asked) == 3 and engine.inspect(A) == before
    assert engine.audit(A)["verdict"] == "clean"
