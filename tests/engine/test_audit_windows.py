"""Audit, damage and repair where layers have windows: what a window has passed is no fault, what it holds may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.debugging.protocol import FaultRequest
from engine.errors import InvalidRequest
from tests.engine.test_audit import BLOCK, IDS, REPLY, A, B, places, turn
from tests.support.engines import RecordingEngine, tiny_engine

SINKS: dict[str, Any] = {"kind": "llama", "window": 16, "sinks": 4}
LOCAL: dict[str, Any] = {"kind": "gemma3"}
SHARED: dict[str, Any] = {"kind": "qwen3-window", "share_layers": 2}


@pytest.fixture(params=[SINKS, LOCAL, SHARED], ids=["sinks", "local and global", "shared stores"])
def engine(request: pytest.FixtureRequest) -> Iterator[RecordingEngine]:
    engine = tiny_engine(block_size=BLOCK, fault_injection=True, **request.param)
    yield engine
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("kv_format", ["fp32", "int8"])
@pytest.mark.parametrize("options", [SINKS, LOCAL, SHARED], ids=["sinks", "local and global", "shared stores"])
def test_clean_chats_raise_no_alarm(options: dict[str, Any], kv_format: str) -> None:
    engine = tiny_engine(block_size=BLOCK, kv_format=kv_format, **options)
    try:
        history = (*IDS, *turn(engine, A, forced_ids=REPLY).token_ids)
        turn(engine, A, (*history, *IDS[:9]))
        told, report = engine.audit(A), engine.inspect(A)
    finally:
        engine.close()
    assert told["verdict"] == "clean" and told["logits_error"] < 1e-3
    assert 0 < told["checked_tokens"] <= told["cache_pos"] and all(report["invariants"].values())


@pytest.mark.parametrize("kind", ["scale", "overwrite", "wrong_position", "nan"])
def test_damage_within_the_windows_is_found_and_repaired(engine: RecordingEngine, kind: str) -> None:
    turn(engine, B)
    before = turn(engine, A).stats.cache_pos
    start = before - 9
    engine.inject(FaultRequest(A, kind, 1, start, 3))
    told = engine.audit(A)
    assert [place[:1] + place[2:] for place in places(told)] == [(kind, start, start + 2)]
    assert 1 in told["faults"][0]["layers"]
    engine.repair(A)
    assert engine.audit(A)["verdict"] == engine.audit(B)["verdict"] == "clean"
    assert engine.inspect(A)["cache_pos"] == before


def test_an_audit_of_damage_far_back_leaves_the_session_what_it_has(engine: RecordingEngine) -> None:
    """The fork that an audit runs on let go of blocks on behalf of the session, and the engine stopped."""
    turn(engine, A)
    start = 2 if engine.capabilities()["groups"][0]["sinks"] else 5 * BLOCK
    engine.inject(FaultRequest(A, "overwrite", 1, start, 2))
    assert engine.audit(A)["faults"][0]["first_position"] == start
    engine.check_integrity()
    engine.repair(A)
    assert engine.audit(A)["verdict"] == "clean"


def test_what_a_window_has_passed_can_not_be_damaged() -> None:
    engine = tiny_engine(block_size=BLOCK, fault_injection=True, **SINKS)
    try:
        turn(engine, A)
        turn(engine, A, (*IDS, *IDS[:30]))
        with pytest.raises(InvalidRequest, match="A window has passed"):
            engine.inject(FaultRequest(A, "nan", 0, 20, 2))
        engine.inject(FaultRequest(A, "nan", 0, 1, 2))  # a sink
        assert places(engine.audit(A)) == [("nan", [0], 1, 2)]
    finally:
        engine.close()
