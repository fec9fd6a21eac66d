"""Sessions in different KV formats beside each other: each as if it were alone, all under one budget."""

from __future__ import annotations

import random
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from engine.debugging.protocol import FaultRequest
from engine.errors import ContextOverflow, InvalidRequest
from engine.local import LocalEngine
from engine.protocol import Failed, Finished, GenerateRequest
from engine.sampling.params import SamplingParams
from tests.engine.test_snapshots import PROMPT, A, B, C, engine_over
from tests.support.engines import tiny_engine
from tests.support.fake_engine import wait_until

OTHER = tuple((11 * index) % 200 + 20 for index in range(100))
FORMATS = ("fp32", "fp16", "bf16", "int8", "fp8", "int4")


def turn(
    engine: LocalEngine,
    session: str | None,
    ids: tuple[int, ...],
    kv_format: str | None,
    count: int = 24,
    stored_cache_pos: int = 0,
) -> Finished:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, kv_format=kv_format, top_logprobs=0)
    events = list(engine.generate(GenerateRequest(ids, params, session, stored_cache_pos=stored_cache_pos)))
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[tuple[int, ...]]]:
    """Two turns in each format, by engines that have no other."""
    found = {}
    for kv_format in FORMATS:
        engine = tiny_engine(kv_format=kv_format)
        first = turn(engine, A, PROMPT, None).token_ids
        found[kv_format] = [first, turn(engine, A, (*PROMPT, *first, 7), None).token_ids]
        engine.close()
    return found


def test_each_session_is_kept_as_it_asks_and_answers_as_if_alone(alone: dict[str, list[tuple[int, ...]]]) -> None:
    engine = tiny_engine()
    sessions = {kv_format: str(uuid.uuid4()) for kv_format in FORMATS}
    firsts: dict[str, Finished] = {}
    threads = [
        threading.Thread(target=lambda f=f: firsts.__setitem__(f, turn(engine, sessions[f], PROMPT, f)))
        for f in FORMATS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kv_format in FORMATS:
        assert firsts[kv_format].token_ids == alone[kv_format][0], kv_format
        second = turn(engine, sessions[kv_format], (*PROMPT, *firsts[kv_format].token_ids, 7), kv_format)
        assert second.token_ids == alone[kv_format][1], kv_format
        assert second.stats.reused_tokens == firsts[kv_format].stats.cache_pos
        report = engine.inspect(sessions[kv_format])
        assert report["kv_format"] == kv_format and {block["format"] for block in report["blocks"]} == {kv_format}
        assert all(report["invariants"].values())
    sizes = {f: engine.inspect(sessions[f])["bytes_per_token"] for f in FORMATS}
    assert (
        sizes["fp32"]
        == 2 * sizes["fp16"]
        == 2 * sizes["bf16"]
        > 2 * sizes["int8"]
        > 2 * sizes["fp8"]
        > 2 * sizes["int4"]
    )
    memory = engine.memory()
    assert memory["kv_used"] == sum(part["kv_used"] for part in memory["formats"].values())
    assert memory["kv_reserved"] == sum(part["kv_reserved"] for part in memory["formats"].values())
    assert engine.metrics()["blocks_used"] == sum(part["blocks_used"] for part in memory["formats"].values())
    engine.check_integrity()
    engine.close()


def test_a_session_that_changes_its_format_is_computed_anew_and_leaves_nothing_behind(
    alone: dict[str, list[tuple[int, ...]]],
) -> None:
    engine = tiny_engine()
    first = turn(engine, A, PROMPT, "fp32")
    ids = (*PROMPT, *first.token_ids, 7)
    second = turn(engine, A, ids, "int8", stored_cache_pos=first.stats.cache_pos)
    assert second.stats.reused_tokens == 0 and second.stats.miss is not None
    assert (second.stats.miss.cause, second.stats.miss.tokens_lost) == ("kv_format", first.stats.cache_pos)
    assert second.token_ids == turn(engine, B, ids, "int8").token_ids
    engine.release(B)
    formats = engine.memory()["formats"]
    assert formats["fp32"]["blocks_used"] == 0 and formats["int8"]["blocks_used"] > 0
    back = turn(engine, A, ids, None)
    assert back.stats.reused_tokens == 0 and back.token_ids == alone["fp32"][1]
    engine.release(A)
    assert engine.memory()["kv_used"] == 0
    engine.close()


def test_a_session_stays_in_its_format_over_a_restart(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        first = turn(engine, A, PROMPT, "int8")
        assert engine.snapshot(A)["tokens"] == first.stats.cache_pos
    with engine_over(tmp_path) as engine:
        report = engine.inspect(A)
        assert report["away"] == {"tier": "disk", "tokens": first.stats.cache_pos} and report["refused"] is None
        assert {block["format"] for block in report["blocks"]} == {"int8"}
        second = turn(engine, A, (*PROMPT, *first.token_ids, 7), "int8")
        assert second.stats.reused_tokens == first.stats.cache_pos and second.stats.miss is None
    with engine_over(tmp_path) as engine:
        third = turn(engine, A, (*PROMPT, *first.token_ids, 7), "fp16")
        assert third.stats.reused_tokens == 0 and "KV format" in str(engine.inspect(A)["refused"] or "KV format")


@pytest.mark.parametrize("act", ["restore", "audit", "inject", "snapshot", "repair"])
def test_after_a_restart_a_session_is_used_in_its_own_format_before_its_first_turn(tmp_path: Path, act: str) -> None:
    """Its snapshot was refused in the engine's own format, and its blocks computed again."""
    with engine_over(tmp_path) as engine:
        first = turn(engine, A, PROMPT, "int8")
        cached = first.stats.cache_pos
        assert engine.snapshot(A)["tokens"] == cached
    with engine_over(tmp_path, fault_injection=True) as engine:
        engine.asked_format = {A: "int8"}.get
        assert list(engine.memory()["formats"]) == ["fp32"]
        if act == "restore":
            assert engine.restore(A) == cached
        elif act == "audit":
            assert (engine.audit(A)["verdict"], engine.audit(A)["checked_tokens"]) == ("clean", cached)
        elif act == "inject":
            engine.inject(FaultRequest(A, "overwrite", 0, 40, 4))
            found = engine.audit(A)
            assert found["verdict"] == "fault" and found["faults"][0]["first_position"] == 40
            assert engine.repair(A)["cache_pos"] == cached
        elif act == "repair":
            assert engine.repair(A)["cache_pos"] == cached
        else:
            assert engine.snapshot(A)["tokens"] == cached
        second = turn(engine, A, (*PROMPT, *first.token_ids, 7), "int8")
        assert second.stats.reused_tokens == cached and second.stats.miss is None
        report = engine.inspect(A)
        assert report["refused"] is None and report["kv_format"] == "int8"


@pytest.mark.parametrize(
    ("asked", "changed", "field"),
    [(None, {}, "KV format"), ("fp16", {}, "KV format"), ("int8", {"kind": "bamba"}, "weights")],
    ids=["the engine's own", "another", "no other format"],
)
def test_no_lane_is_made_for_what_the_session_does_not_ask_for_or_can_not_have(
    tmp_path: Path, asked: str | None, changed: dict[str, Any], field: str
) -> None:
    with engine_over(tmp_path) as engine:
        turn(engine, A, PROMPT, "int8")
        engine.snapshot(A)
    with engine_over(tmp_path, **changed) as engine:
        engine.asked_format = {A: asked}.get
        assert engine.restore(A) == 0 and f"The snapshot's {field} is" in engine.inspect(A)["refused"]
        assert list(engine.memory()["formats"]) == ["fp32"]


def held(engine: LocalEngine) -> int:
    """Bytes up to the highest block in use, over all formats."""

    def count() -> int:
        lanes = engine._all()
        return sum((lane.prefix_cache.pool.high_water - 1) * lane.parts.cache.spec.block_bytes for lane in lanes)

    return engine._call(count)


def test_formats_share_one_budget_and_idle_sessions_give_way(tmp_path: Path) -> None:
    """The pool has 79 blocks of 4 tokens: two sessions of 123 tokens in float32, so the third needs their room."""
    with engine_over(tmp_path, blocks=80) as engine:
        budget = 80 * engine.memory()["block_bytes"]
        first = turn(engine, A, PROMPT, None)
        turn(engine, B, OTHER, None)
        both = engine.memory()["formats"]["fp32"]["blocks_used"]
        assert turn(engine, C, PROMPT, "fp16").stats.reused_tokens == 0
        assert held(engine) <= budget
        assert engine.memory()["formats"]["fp32"]["blocks_used"] == both, "sixteen bits still fit beside them"
        large = tuple(random.Random(1).choices(range(20, 220), k=300))
        turn(engine, str(uuid.uuid4()), large, "fp16")
        assert held(engine) <= budget
        assert engine.memory()["formats"]["fp32"]["blocks_used"] < both
        again = turn(engine, A, (*PROMPT, *first.token_ids, 7), None)
        assert again.stats.reused_tokens == first.stats.cache_pos, "from its snapshot"
        assert held(engine) <= budget
        engine.check_integrity()


def test_a_turn_waits_for_another_format_that_is_running(tmp_path: Path) -> None:
    """The running one needs 60 of 79 blocks; the newcomer's 52 (of half the size) fit only once it is idle."""
    with engine_over(tmp_path, blocks=66) as engine:
        turn(engine, None, PROMPT[:8], "fp16", 1)  # so that making the lane takes no part in it
        first = engine.generate(_request(A, PROMPT, None, 130))
        events = iter(first)
        next(events)
        newcomer: list[Any] = []
        thread = threading.Thread(target=lambda: newcomer.extend(engine.generate(_request(B, OTHER, "fp16", 100))))
        thread.start()
        last = list(events)[-1]
        thread.join(60)
        assert isinstance(last, Finished) and len(last.token_ids) == 130
        assert isinstance(newcomer[-1], Finished) and len(newcomer[-1].token_ids) == 100
        assert wait_until(lambda: not engine._call(lambda: engine._all().has_work))
        engine.check_integrity()


def _request(session: str, ids: tuple[int, ...], kv_format: str | None, count: int) -> GenerateRequest:
    return GenerateRequest(
        ids, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, kv_format=kv_format), session
    )


def test_what_fits_in_no_case_fails_with_a_sentence() -> None:
    engine = tiny_engine(kv_format="int4", blocks=40, max_seq_len=150)
    assert turn(engine, A, PROMPT, None).stats.finish_reason == "length"
    with pytest.raises(ContextOverflow, match=r"The prompt has 100 tokens, but the context holds \d+"):
        engine.generate(_request(B, PROMPT, "fp32", 8))
    engine.close()


@pytest.mark.parametrize("name", ["auto", "int3", "", 8, ["fp16"]])
def test_unknown_formats_are_refused(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="kv_format must be one of fp32, fp16, bf16, int8, fp8, int4"):
        SamplingParams(kv_format=name)


def test_recurrent_models_say_that_they_keep_one_format() -> None:
    engine = tiny_engine(kind="bamba")
    with pytest.raises(InvalidRequest, match="recurrent layers"):
        engine.generate(_request(A, PROMPT, "int8", 8))
    assert turn(engine, A, PROMPT, "fp32").stats.finish_reason == "length"
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_turns_in_all_formats_stay_within_the_budget(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    sessions = [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(6)]
    histories: dict[str, tuple[int, ...]] = {}
    with engine_over(tmp_path, blocks=70, ram_limit=rng.choice((0, 2**17))) as engine:
        budget = 70 * engine.memory()["block_bytes"]
        for _ in range(25):
            session, kv_format = rng.choice(sessions), rng.choice(("fp32", "fp16", "int8"))
            ids = (*histories.get(session, ()), *rng.choices(range(20, 220), k=rng.randint(5, 40)))
            if len(ids) > 180:
                engine.release(session)
                histories.pop(session, None)
                continue
            done = turn(engine, session, ids, kv_format, rng.randint(1, 20))
            histories[session] = (*ids, *done.token_ids)
            engine.check_integrity()
            assert held(engine) <= budget
            assert all(engine.inspect(session)["invariants"].values())


def test_a_failing_lane_leaves_the_others_alone() -> None:
    engine = tiny_engine()
    turn(engine, B, PROMPT, "fp16")
    lane = engine._all().find("fp16")
    assert lane is not None
    sequence = lane.scheduler.idle[B]
    engine._call(lambda: lane.parts.cache.extents[0][sequence.block_table[0]].fill_(float("nan")))
    params = SamplingParams(temperature=0, max_tokens=4, kv_format="fp16")
    last = list(engine.generate(GenerateRequest((*PROMPT, *sequence.token_ids[len(PROMPT) :], 5), params, B)))[-1]
    assert isinstance(last, Failed) and "not finite" in str(last.error)
    assert turn(engine, A, PROMPT, None).stats.finish_reason == "length"
    engine.close()
