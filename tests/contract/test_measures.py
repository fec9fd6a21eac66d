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
