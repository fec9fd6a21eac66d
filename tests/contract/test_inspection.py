"""Health, tokens, cache, memory, metrics."""

from __future__ import annotations

import json
import re
import uuid

import pytest

from tests.contract.test_openai import ASK, assert_error, post
from tests.contract.test_sessions import send


@pytest.mark.parametrize("state", ["loading", "ok", "stopped"])
def test_health_always_answers(client, engine, state):
    engine.state = state
    body = client.get("/health").json()
    assert body["status"] == state and set(body) == {"status", "model", "device"}
    assert body["model"] == ("fake-model" if state == "ok" else None)


def test_tokens_of_a_conversation_are_those_of_its_prompt(client, engine):
    body = client.post("/tokenize", json=ASK).json()
    post(client, ASK)
    assert tuple(body["tokens"]) == engine.requests[0].prompt_ids and body["count"] == len(body["tokens"])


def test_text_to_tokens_and_back(client):
    text = "Hello 世界 👩‍👩‍👧‍👦"
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["text"] == text
    assert client.post("/detokenize", json={"tokens": []}).json()["text"] == ""


@pytest.mark.parametrize("body", [{}, {"prompt": 5}, {"prompt": None}, {"messages": []}, {"prompt": "a", **ASK}])
def test_senseless_texts(refusing, body):
    assert_error(refusing.post("/tokenize", json=body), 400)


@pytest.mark.parametrize("tokens", [None, "1", [1.5], [True], ["1"], [-1], [10**6], [2**40], {"a": 1}])
def test_senseless_tokens(refusing, tokens):
    assert_error(refusing.post("/detokenize", json={"tokens": tokens}), 400)


def test_cache_and_probe(client, session_id):
    path = f"/api/sessions/{session_id}/cache"
    assert client.get(path).json()["cache_pos"] == 0
    stats = send(client, session_id)["kvscope"]
    assert client.get(path).json()["cache_pos"] == stats["cache_pos"]
    positions = client.get(f"{path}/probe", params={"start": 1, "count": 3, "dims": 2}).json()["positions"]
    assert [item["position"] for item in positions] == [1, 2, 3]
    assert positions[0]["values"] == [None, 0.5], "a value that is not finite has no JSON number"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("tensor=x", "tensor"),
        ("layer=a", "layer must be a whole number, not 'a'."),
        ("head=1.5", "head must be a whole number, not '1.5'."),
        ("count=1e9", "count must be a whole number, not '1e9'."),
        ("start=", "start must be a whole number, not ''."),
        ("dims=17", "dims must lie between 1 and 16, the size of a head."),
        ("dims=99999", "16"),
        ("layer=" + "9" * 5000, "layer must be a smaller number"),
    ],
    ids=["tensor", "letter", "fraction", "exponent", "nothing", "head size", "far beyond", "digits"],
)
def test_senseless_probes_are_told_what_would_make_sense(client, session_id, query, words):
    assert words in assert_error(client.get(f"/api/sessions/{session_id}/cache/probe?{query}"), 400)["message"]


def test_snapshot_now_and_what_is_on_disk(client, engine, session_id):
    path = f"/api/sessions/{session_id}/snapshot"
    for method in ("GET", "POST"):
        assert_error(client.request(method, path), 404)
        assert_error(client.request(method, f"/api/sessions/{uuid.uuid4()}/snapshot"), 404)
        assert_error(client.request(method, "/api/sessions/../snapshot/x/snapshot"), 404)
        assert_error(client.request(method, "/api/sessions/not-an-id/snapshot"), 400)
    stats = send(client, session_id)["kvscope"]
    written = client.post(path).json()
    assert written["tokens"] == stats["cache_pos"] and written["bytes"] > 0 and written["age_s"] >= 0
    assert set(written["fingerprint"]) >= {"weights", "KV format"} and client.get(path).json() == written
    client.delete(f"/api/sessions/{session_id}")
    assert engine.stored_sessions() == []
    assert_error(client.get(path), 404)


def test_a_session_that_is_answering_can_not_be_written(client, engine, session_id):
    engine._busy.add(session_id)
    assert_error(client.post(f"/api/sessions/{session_id}/snapshot"), 409)


def test_a_session_deleted_while_the_model_loads_leaves_no_snapshot(client, chat, engine, session_id):
    send(client, session_id)
    engine.snapshot(session_id)
    engine.state = "loading"
    assert client.delete(f"/api/sessions/{session_id}").status_code == 200
    assert engine.stored_sessions() == []


def test_snapshots_of_sessions_that_are_gone_are_dropped(client, chat, engine, session_id):
    other = str(client.post("/api/sessions").json()["id"])
    for session in (session_id, other):
        send(client, session)
        engine.snapshot(session)
    chat.store.delete(other)
    chat.forget_orphans()
    assert engine.stored_sessions() == [session_id]


def test_memory(client, engine):
    assert "kv_used" in client.get("/api/memory").json()
    engine.state = "loading"
    assert_error(client.get("/api/memory"), 503)


def test_metrics_are_prometheus_text(client, engine):
    post(client, {**ASK, "max_tokens": 3})
    post(client, {**ASK, "max_tokens": 3})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for line in response.text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"\})? [-+.\de]+', line), line
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)
    assert samples['kvscope_turns_total{finish_reason="length"}'] == 2
    assert samples['kvscope_tokens_total{kind="generated"}'] == 6
    assert samples['kvscope_ttft_seconds_bucket{le="+Inf"}'] == samples["kvscope_ttft_seconds_count"] == 2
    assert samples["kvscope_up"] == 1
    assert samples["kvscope_kv_fragmentation"] == 0.25 and samples["kvscope_kv_empty_bytes"] == 250
    assert [samples[f'kvscope_kv_bytes{{place="{place}"}}'] for place in ("reserved", "ram", "disk")] == [1000, 30, 40]
    engine.state = "stopped"
    assert "kvscope_up 0" in client.get("/metrics").text


def test_answers_are_valid_json_in_utf8(client, session_id):
    send(client, session_id, "世界")
    raw = client.get(f"/api/sessions/{session_id}").content
    assert json.loads(raw.decode("utf-8"))["messages"][0]["content"] == "世界"


def test_maps_values_and_blocks(client, engine, session_id):
    path = f"/api/sessions/{session_id}/cache"
    for route in ("map", "values", "block"):
        assert_error(client.get(f"{path}/{route}"), 409)
    engine.caches[session_id] = list(range(65, 90))
    told = client.get(f"{path}/map?what=v_norm&head=1&columns=64").json()
    assert (told["session_id"], told["what"], told["head"], told["columns"]) == (session_id, "v_norm", 1, [[0, 64]])
    assert told["values"] == [[None]]  # what is not finite is no number in JSON
    assert client.get(f"{path}/map").json()["head"] is None
    assert client.get(f"{path}/values?layer=2&position=7").json()["position"] == 7
    assert client.get(f"{path}/block?start=16").json()["count"] == 9
    for wrong in ("map?columns=many", "values?layer=x", "block?start=x"):
        assert_error(client.get(f"{path}/{wrong}"), 400)
    assert_error(client.get(f"/api/sessions/{uuid.uuid4()}/cache/map"), 404)


def test_memory_history(client, engine):
    assert client.get("/api/memory/history").json() == {"every_s": 5.0, "points": []}
    engine.state = "stopped"
    assert_error(client.get("/api/memory/history"), 503)
