"""The timeline of a session as a file for trace viewers."""

from __future__ import annotations

import uuid

from tests.contract.test_openai import assert_error
from tests.contract.test_sessions import send


def test_a_trace_is_a_file_that_says_what_was_done_before_each_turn(client, engine, session_id):
    path = f"/api/sessions/{session_id}/trace"
    assert [event["ph"] for event in client.get(path).json()["traceEvents"]] == ["M", "M", "M"]
    send(client, session_id)
    client.post(f"/api/sessions/{session_id}/regenerate")
    answer = client.get(path)
    assert answer.headers["content-disposition"] == f'attachment; filename="kvscope-{session_id[:8]}.trace.json"'
    trace = answer.json()
    assert trace["otherData"]["session_id"] == session_id and trace["displayTimeUnit"] == "ms"
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events if event["tid"] == 1] == ["render", "store"] * 2
    turns = [event["args"]["turn"] for event in events if event["name"] == "turn"]
    assert turns == [request.request_id for request in engine.requests]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)


def test_a_trace_that_can_not_be_had(client, engine, session_id):
    assert_error(client.get("/api/sessions/x/trace"), 400)
    assert_error(client.get(f"/api/sessions/{uuid.uuid4()}/trace"), 404)
    engine.state = "stopped"
    assert_error(client.get(f"/api/sessions/{session_id}/trace"), 503)
