"""The routes of the debugging view: what they take, what they refuse, and that damage needs permission."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from engine.debugging.protocol import FaultRequest
from tests.contract.conftest import LOCAL
from tests.contract.test_sessions import UNKNOWN, assert_error
from tests.support.chats import tiny_chat
from ui.api.routes import build_api
from ui.security import Security


def test_an_audit_takes_positions_or_none(client, session_id):
    url = f"/api/sessions/{session_id}/audit"
    assert client.post(url).json()["of"] is None
    assert client.post(url, json={"positions": 5}).json()["of"] == 5
    assert client.post(url, json={"positions": [1, 2]}).json()["of"] == [1, 2]
    for wrong in ("all", True, [1.5], {"first": 1}):
        assert_error(client.post(url, json={"positions": wrong}), 400)


def test_damage_is_forbidden_unless_it_was_allowed(client, engine, session_id):
    body = {"session_id": session_id, "kind": "nan", "layer": 1, "start": 2, "count": 3}
    refused = client.post("/api/debug/inject", json=body)
    assert_error(refused, 403)
    assert refused.json()["error"]["type"] == "permission_error" and not engine.faults
    engine.fault_injection = True
    assert client.post("/api/debug/inject", json=body).status_code == 200
    assert engine.faults == [FaultRequest(session_id, "nan", 1, 2, 3)]


def test_layer_null_means_all(client, engine, session_id):
    engine.fault_injection = True
    client.post("/api/debug/inject", json={"session_id": session_id, "kind": "scale", "layer": None, "amount": 1.5})
    assert engine.faults == [FaultRequest(session_id, "scale", None, 0, 1, 1.5)]


@pytest.mark.parametrize(
    "change",
    [{"session_id": "x"}, {"session_id": None}, {"kind": None}, {"kind": 3}, {"layer": "all"}, {"start": "0"},
     {"count": 1.5}, {"amount": "much"}, {"amount": True}],
    ids=str,
)  # fmt: skip
def test_a_malformed_fault_is_refused(client, engine, session_id, change):
    engine.fault_injection = True
    assert_error(client.post("/api/debug/inject", json={"session_id": session_id, "kind": "nan", **change}), 400)
    assert not engine.faults


def test_an_unknown_session_can_not_be_damaged(client, engine):
    engine.fault_injection = True
    assert_error(client.post("/api/debug/inject", json={"session_id": UNKNOWN, "kind": "nan"}), 404)


def test_a_fault_is_found_and_cured_over_http(tmp_path):
    """The same with a real engine: damage, what is told of it as valid JSON, repair, and what acts cost."""
    with tiny_chat(tmp_path, fault_injection=True) as chat:
        client = TestClient(Security(build_api(chat.service)), base_url=LOCAL)
        session_id = client.post("/api/sessions").json()["id"]
        url = f"/api/sessions/{session_id}"
        said = client.post(f"{url}/messages", json={"content": "Hello there", "params": {"max_tokens": 12, "seed": 1}})
        assert said.json()["kvscope"]["violation"] is None
        assert client.post(f"{url}/audit").json()["verdict"] == "clean"
        body = {"session_id": session_id, "kind": "nan", "layer": 1, "start": 5, "count": 2}
        assert client.post("/api/debug/inject", json=body).json()["count"] == 2
        told = client.post(f"{url}/audit").json()
        [fault] = told["faults"]
        assert (fault["kind"], fault["layers"], fault["first_position"], fault["max_error"]) == ("nan", [1], 5, None)
        assert {"verdict", "noise_floor", "max_error", "logits_error", "checked_tokens", "ms", "heat"} <= set(told)
        assert "not finite" in told["sentence"]
        assert client.get(f"{url}/cache").json()["audit"]["verdict"] == "fault"
        assert client.post(f"{url}/repair").json()["recomputed_tokens"] > 0
        assert client.post(f"{url}/audit").json()["verdict"] == "clean"
        price = client.post(f"{url}/price", json={"action": "regenerate"}).json()
        assert price["tokens"] == price["prompt_tokens"] - price["reused_tokens"] and price["seconds"] >= 0
        assert client.get(f"{url}/misses").json() == {"session_id": session_id, "misses": []}
        assert_error(client.post(f"{url}/price", json={"action": "dance"}), 400)
        assert_error(client.post(f"{url}/price", json={}), 400)
        assert_error(client.post("/api/debug/inject", json={**body, "layer": 9}), 400)


def test_a_chat_with_a_format_of_its_own_is_audited_in_it_after_a_restart(tmp_path):
    options = {"data_dir": tmp_path, "snapshot_limit": 2**24}
    with tiny_chat(tmp_path, **options) as chat:
        client = TestClient(Security(build_api(chat.service)), base_url=LOCAL)
        session_id = client.post("/api/sessions", json={"params": {"kv_format": "int8"}}).json()["id"]
        url = f"/api/sessions/{session_id}"
        said = client.post(
            f"{url}/messages", json={"content": "The tide comes in.", "params": {"max_tokens": 12, "seed": 1}}
        )
        cached = client.post(f"{url}/snapshot").json()["tokens"]
        assert said.json()["kvscope"]["cache_pos"] == cached
    with tiny_chat(tmp_path, **options) as chat:
        client = TestClient(Security(build_api(chat.service)), base_url=LOCAL)
        found = client.post(f"{url}/audit").json()
        assert (found["verdict"], found["checked_tokens"]) == ("clean", cached)
        assert client.get(f"{url}/cache").json()["kv_format"] == "int8"
