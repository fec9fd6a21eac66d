"""Routes that measure, over the real store."""

from __future__ import annotations

import uuid


def say(client, session_id: str, text: str = "Hello there"):
    return client.post(f"/api/sessions/{session_id}/messages", json={"content": text}).json()


def test_a_sessions_branch_is_compared(client, engine, session_id):
    stats = say(client, session_id)["kvscope"]
    found = client.post(f"/api/sessions/{session_id}/compare").json()
    assert found["kv_format"] == "fp16" and found["tokens"] == 64
    assert found["of"] >= stats["prompt_tokens"] + 10
    asked = client.post(f"/api/sessions/{session_id}/compare", json={"count": 5, "kv_format": "int4"}).json()
    assert (asked["tokens"], asked["kv_format"]) == (5, "int4")


def test_what_can_not_be_compared_is_told_so(client, session_id):
    def status(session: str, body: object) -> int:
        response = client.post(f"/api/sessions/{session}/compare", json=body)
        assert response.json()["error"]["message"]
        return response.status_code

    assert status(session_id, {}) == 400  # nothing said yet
    assert status(str(uuid.uuid4()), {}) == 404
    assert status("x", {}) == 400
    say(client, session_id)
    for body in ({"count": "many"}, {"count": True}, {"kv_format": 4}, []):
        assert status(session_id, body) == 400


def test_advice_comes_from_the_stored_turns(client, chat, session_id):
    few = client.get("/api/advice").json()
    assert few["turns"] == 0 and few["recommended"] is None
    lengths = []
    for index in range(20):
        stats = say(client, session_id, f"Number {index}")["kvscope"]
        lengths.append(stats["prompt_tokens"] + stats["generated_tokens"])
    found = client.get("/api/advice").json()
    assert found["turns"] == 20 and found["cdf"][-1] == [max(lengths), 1.0]
    assert found["p50"] == sorted(lengths)[9] and found["max_seq_len"] == 2048
    assert found["recommended"] % 16 == 0 and 10 * found["recommended"] >= 11 * found["p99"]
    assert found["saved_bytes"] == max(2048 - found["recommended"], 0) * 1024


def test_advice_leaves_odd_numbers_of_an_import_out(client, chat, session_id):
    say(client, session_id)
    data = client.get(f"/api/sessions/{session_id}/export").json()
    for odd in (
        {"prompt_tokens": "many"},
        {"prompt_tokens": 2**70},
        {"generated_tokens": -1},
        {"generated_tokens": 1.5},
    ):
        turn = data["turns"][0]
        client.post("/api/sessions/import", json={**data, "turns": [{**turn, "stats": {**turn["stats"], **odd}}]})
    assert len(client.get("/api/sessions").json()["sessions"]) == 5
    assert client.get("/api/advice").json()["turns"] == 1
