"""Routes of stored sessions."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from engine.errors import NonFiniteValues
from sessions.errors import StoreError
from tests.contract.test_openai import assert_error
from tests.support.fake_engine import reply_text, wait_until

UNKNOWN = "00000000-0000-4000-8000-000000000000"
MALFORMED = ("abc", "123", UNKNOWN[:-1], UNKNOWN + "0", "{" + UNKNOWN[1:-1] + "}", "..%2f..%2fetc", "%00", "世界")


def send(client, session_id: str, content: str = "Hello there", **more: Any) -> dict[str, Any]:
    response = client.post(f"/api/sessions/{session_id}/messages", json={"content": content, **more})
    assert response.status_code == 200, response.text
    return response.json()


def events_of(response) -> list[tuple[str, dict[str, Any]]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def messages_of(client, session_id: str) -> list[dict[str, Any]]:
    return client.get(f"/api/sessions/{session_id}").json()["messages"]


def test_create_read_change_delete(client):
    params = {"temperature": 0.2, "stop": ["x"], "logit_bias": {"5": -1}}
    made = client.post("/api/sessions", json={"title": "One", "system_prompt": "Be brief.", "params": params}).json()
    path = f"/api/sessions/{made['id']}"
    read = client.get(path).json()
    assert (read["title"], read["system_prompt"], read["params"]) == ("One", "Be brief.", params)
    assert read["messages"] == [] and read["running"] is False
    changed = client.patch(path, json={"title": "Two", "system_prompt": "", "params": {"seed": 1}}).json()
    assert (changed["title"], changed["system_prompt"], changed["params"]) == ("Two", "", {"seed": 1})
    assert client.delete(path).json()["deleted"] is True
    assert_error(client.get(path), 404)
    assert_error(client.delete(path), 404)


def test_list_and_search(client):
    first = client.post("/api/sessions", json={"title": "Apples and pears"}).json()["id"]
    second = client.post("/api/sessions", content=b"").json()["id"]
    send(client, second, "Tell me of 世界 and zebras")
    listed = client.get("/api/sessions").json()["sessions"]
    assert [item["id"] for item in listed] == [second, first]
    for query, found in (("pears", [first]), ("zebras", [second]), ("世界", [second]), ("nothing", []), ("%", [])):
        answer = client.get("/api/sessions", params={"q": query}).json()["sessions"]
        assert [item["id"] for item in answer] == found, query


@pytest.mark.parametrize(
    "body",
    [
        {"title": 5}, {"title": ""}, {"title": "x" * 201}, {"system_prompt": 5}, {"system_prompt": "x" * 100_000},
        {"params": 5}, {"params": []}, {"params": {"heat": 1}}, {"params": {"temperature": "a"}},
        {"params": {"max_tokens": 0}}, {"unknown": 1}, {"head_id": UNKNOWN},
    ],
    ids=lambda body: str(body)[:40],
)  # fmt: skip
def test_senseless_settings_are_refused(client, session_id, body):
    assert_error(client.post("/api/sessions", json=body), 400)
    assert_error(client.patch(f"/api/sessions/{session_id}", json=body), 400)
    assert len(client.get("/api/sessions").json()["sessions"]) == 1


@pytest.mark.parametrize("name", ["title", "system_prompt", "params"])
def test_a_setting_is_not_changed_to_null(client, session_id, name):
    assert_error(client.patch(f"/api/sessions/{session_id}", json={name: None}), 400)


ROUTES = [
    ("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/messages"), ("PUT", f"/messages/{UNKNOWN}"),
    ("POST", "/regenerate"), ("POST", "/undo"), ("POST", "/stop"), ("POST", "/fork"), ("GET", "/export"),
    ("GET", "/export?format=md"), ("GET", "/cache"), ("GET", "/cache/probe"), ("POST", "/audit"), ("POST", "/repair"),
    ("GET", "/misses"), ("GET", "/trace"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_unknown_sessions_get_404_and_malformed_ids_400(client, method, route):
    body = {"json": {"content": "x"} if "messages" in route else {}} if method != "GET" else {}
    if method == "DELETE":
        body = {}
    assert_error(client.request(method, f"/api/sessions/{UNKNOWN}{route}", **body), 404)
    for name in MALFORMED:
        response = client.request(method, f"/api/sessions/{name}{route}", **body)
        assert response.status_code in (400, 404), name
        assert_error(response, response.status_code)


@pytest.mark.parametrize("route", ["/unknown", "/audit/now"])
def test_routes_that_do_not_exist_get_404(client, session_id, route):
    assert_error(client.post(f"/api/sessions/{session_id}{route}"), 404)
    assert_error(client.get(f"/api/sessions/{session_id}{route}"), 404)


def test_wrong_methods_get_405(client, session_id):
    for method, path in (("PUT", "/api/sessions"), ("GET", "/v1/chat/completions"), ("POST", "/health"),
                         ("GET", f"/api/sessions/{session_id}/messages"), ("DELETE", "/metrics")):  # fmt: skip
        assert_error(client.request(method, path), 405)


def test_a_message_is_answered_and_stored(client, engine, session_id):
    body = send(client, session_id, params={"seed": 4})
    text = reply_text(engine.requests[0].prompt_ids, 4)
    assert body["content"] == body["message"]["content"] == text and body["finish_reason"] == "stop"
    assert body["kvscope"]["session_id"] == session_id and body["kvscope"]["seed"] == 4
    user, reply = messages_of(client, session_id)
    assert (user["id"], reply["id"]) == (body["user_message_id"], body["message_id"])
    assert reply["parent_id"] == user["id"] and reply["kvscope"] == body["kvscope"]


def test_a_streamed_turn(client, engine, session_id):
    asked = {"content": "Hello", "stream": True, "params": {"seed": 4}}
    events = events_of(client.post(f"/api/sessions/{session_id}/messages", json=asked))
    names = [name for name, _ in events]
    assert names[0] == "start" and names[-1] == "done" and set(names) == {"start", "token", "stats", "done"}
    start, done = events[0][1], events[-1][1]
    user, reply = messages_of(client, session_id)
    assert (start["user_message_id"], start["message_id"], start["dropped"]) == (user["id"], reply["id"], [])
    text = "".join(data["text"] for name, data in events if name == "token")
    assert text == done["content"] == reply["content"] == reply_text(engine.requests[0].prompt_ids, 4)
    assert done["kvscope"] == reply["kvscope"] == [data for name, data in events if name == "stats"][-1]


@pytest.mark.parametrize(
    "body",
    [
        {}, {"content": None}, {"content": 5}, {"content": ""}, {"content": "  \n"}, {"content": "x" * 100_000},
        {"content": "x", "params": 5}, {"content": "x", "params": {"n": 2}}, {"content": "x", "params": {"top_k": "a"}},
        {"content": "x", "stream": "yes"}, {"content": "x", "params": {"max_completion_tokens": 0}},
    ],
    ids=lambda body: str(body)[:40],
)  # fmt: skip
def test_senseless_messages_are_refused_and_leave_nothing(client, session_id, body):
    first = send(client, session_id)
    assert_error(client.post(f"/api/sessions/{session_id}/messages", json=body), 400)
    edited = f"/api/sessions/{session_id}/messages/{first['user_message_id']}"
    assert_error(client.put(edited, json=body), 400)
    assert len(messages_of(client, session_id)) == 2


def test_settings_of_a_turn_stand_over_those_of_the_session(client, engine, session_id):
    client.patch(f"/api/sessions/{session_id}", json={"params": {"temperature": 0.1, "max_tokens": 9}})
    send(client, session_id, params={"max_completion_tokens": 3})
    send(client, session_id)
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.max_tokens) == (0.1, 3)
    assert (second.temperature, second.max_tokens) == (0.1, 9)


def test_edit_regenerate_undo(client, session_id):
    first = send(client, session_id)
    path = f"/api/sessions/{session_id}"
    edited = client.put(f"{path}/messages/{first['user_message_id']}", json={"content": "Other"}).json()
    user, reply = messages_of(client, session_id)
    assert user["content"] == "Other" and user["siblings"] == [first["user_message_id"], edited["user_message_id"]]
    again = client.post(f"{path}/regenerate").json()
    assert again["user_message_id"] == edited["user_message_id"] and again["message_id"] != reply["id"]
    old = client.post(f"{path}/regenerate", json={"message_id": first["message_id"], "params": {"seed": 1}}).json()
    assert old["user_message_id"] == first["user_message_id"]
    assert client.post(f"{path}/undo").json() == {"text": "Hello there", "head_id": None}
    assert messages_of(client, session_id) == []
    assert_error(client.post(f"{path}/undo"), 400)
    assert_error(client.post(f"{path}/regenerate", json={"message_id": UNKNOWN}), 404)
    assert_error(client.post(f"{path}/regenerate", json={"message_id": 5}), 400)
    reply_path = f"{path}/messages/{first['message_id']}"
    assert_error(client.put(reply_path, json={"content": "x"}), 400)


def test_fork(client, session_id):
    first = send(client, session_id)
    send(client, session_id, "More")
    twin = client.post(f"/api/sessions/{session_id}/fork", json={"message_id": first["message_id"]}).json()
    assert twin["id"] != session_id and len(twin["messages"]) == 2
    assert len(client.post(f"/api/sessions/{session_id}/fork").json()["messages"]) == 4


def test_stop_ends_a_running_reply(client, engine, chat, session_id):
    engine.delay_s = 0.02
    path = f"/api/sessions/{session_id}"
    assert client.post(f"{path}/stop").json() == {"stopped": False}
    answers: list[dict[str, Any]] = []
    asked = {"params": {"ignore_eos": True}}
    thread = threading.Thread(target=lambda: answers.append(send(client, session_id, **asked)))
    thread.start()
    assert wait_until(lambda: (turn := chat.running(session_id)) is not None and turn.view().text)
    assert client.get(path).json()["running"] is True
    assert_error(client.post(f"{path}/messages", json={"content": "Again"}), 409)
    assert client.post(f"{path}/stop").json() == {"stopped": True}
    thread.join(5)
    assert answers[0]["finish_reason"] == "cancelled" and answers[0]["content"]
    assert messages_of(client, session_id)[1]["content"] == answers[0]["content"]


def test_a_bias_for_a_token_that_the_model_lacks_changes_nothing(client, engine, session_id):
    """The user's message and an empty failed reply were stored before the settings were looked at."""
    body = {"content": "a", "params": {"logit_bias": {"99999": 1}}}
    error = assert_error(client.post(f"/api/sessions/{session_id}/messages", json=body), 400)
    assert "99999" in error["message"] and messages_of(client, session_id) == []


def test_a_reply_that_fails_is_told_and_kept(client, engine, session_id):
    engine.fail_with = NonFiniteValues("The model produced values that are not finite.")
    path = f"/api/sessions/{session_id}/messages"
    assert assert_error(client.post(path, json={"content": "a"}), 500)["code"] == "non_finite_values"
    events = events_of(client.post(path, json={"content": "b", "stream": True}))
    assert events[-1][0] == "error" and events[-1][1]["error"]["code"] == "non_finite_values"
    assert [message["status"] for message in messages_of(client, session_id)][1::2] == ["failed", "failed"]


def test_export_and_import(client, session_id):
    send(client, session_id, "Hello 世界")
    path = f"/api/sessions/{session_id}/export"
    exported = client.get(path)
    assert "attachment" in exported.headers["content-disposition"]
    data = exported.json()
    assert data["session"]["id"] == session_id and data["turns"][0]["stats"]["generated_tokens"] > 0
    markdown = client.get(path, params={"format": "md"})
    assert markdown.headers["content-type"].startswith("text/markdown") and "Hello 世界" in markdown.text
    assert_error(client.get(path, params={"format": "pdf"}), 400)
    twin = client.post("/api/sessions/import", json=data).json()
    assert twin["id"] != session_id and twin["messages"][0]["content"] == "Hello 世界"
    client.delete(f"/api/sessions/{session_id}")
    assert client.post("/api/sessions/import", json=data).json()["id"] == session_id


@pytest.mark.parametrize("change", [{"format": "x"}, {"version": 99}, {"session": None}, {"messages": [5]}])
def test_a_damaged_import_stores_nothing(client, session_id, change):
    data = client.get(f"/api/sessions/{session_id}/export").json()
    assert_error(client.post("/api/sessions/import", json={**data, **change}), 400)
    bad = {**data, "session": {**data["session"], "params": {"temperature": "hot"}}}
    assert_error(client.post("/api/sessions/import", json=bad), 400)
    assert len(client.get("/api/sessions").json()["sessions"]) == 1


def test_trouble_with_the_disk_is_one_sentence(client, chat, session_id, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(chat.store, "list", full)
    assert assert_error(client.get("/api/sessions"), 507)["code"] == "storage_failed"


def test_an_unexpected_fault_shows_nothing_of_the_inside(client, chat, session_id, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret at /home/someone/file.py")

    monkeypatch.setattr(chat.store, "list", broken)
    assert "secret" not in assert_error(client.get("/api/sessions"), 500)["message"]
    monkeypatch.setattr(chat.store, "branch", broken)
    assert "secret" not in client.get(f"/api/sessions/{session_id}").text


def test_a_title_with_half_characters(client, session_id):
    changed = client.patch(f"/api/sessions/{session_id}", content=b'{"title":"a \\ud800 b"}')
    assert changed.status_code == 200 and "a" in changed.json()["title"]


def test_a_stream_that_is_left_does_not_end_the_turn(server_url, engine, chat):
    import httpx

    engine.delay_s = 0.01
    session_id = httpx.post(f"{server_url}/api/sessions").json()["id"]
    path = f"{server_url}/api/sessions/{session_id}/messages"
    with httpx.stream("POST", path, json={"content": "Hello", "stream": True}) as response:
        next(response.iter_lines())
    assert wait_until(lambda: chat.running(session_id) is None)
    reply = httpx.get(f"{server_url}/api/sessions/{session_id}").json()["messages"][1]
    asked = engine.requests[0]
    assert reply["content"] == reply_text(asked.prompt_ids, asked.params.seed) and reply["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_session", [False, True])
def test_a_client_that_hangs_up_ends_its_completion(server_url, engine, stream, in_session):
    import httpx

    engine.delay_s = 0.01
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "stream": stream}
    if in_session:
        body["session_id"] = httpx.post(f"{server_url}/api/sessions").json()["id"]
    url = f"{server_url}/v1/chat/completions"
    if stream:
        with httpx.stream("POST", url, json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=httpx.Timeout(30, read=0.3))
    started = time.monotonic()
    assert wait_until(lambda: engine.finished)
    assert time.monotonic() - started < 4  # by itself the reply would take 20 s
    cached = sum(map(len, engine.caches.values()))  # nothing where it ended before its first token
    assert cached < engine.context // 2, "by itself the reply would fill the context"


def test_an_export_says_what_each_reply_was_made_from(client, engine, session_id):
    send(client, session_id)
    send(client, session_id, "And then?", params={"kv_format": "int8", "seed": 5})
    data = client.get(f"/api/sessions/{session_id}/export").json()
    prompt: list[int] = []
    for request, item, reply in zip(engine.requests, data["inputs"], data["messages"][1::2], strict=True):
        prompt = prompt[: item["kept"]] + item["prompt_ids"]
        assert tuple(prompt) == request.prompt_ids and item["message_id"] == reply["id"]
        assert reply["params"]["seed"] == request.params.seed is not None
        assert item["fingerprint"]["weights"] == engine.name and item["beams"] == {}
    assert [item["kv_format"] for item in data["inputs"]] == ["fp16", "int8"]
    assert data["inputs"][1]["kept"] >= len(engine.requests[0].prompt_ids) - 1
    again = client.post("/api/sessions/import", json=data).json()["id"]
    renamed = client.get(f"/api/sessions/{again}/export").json()["inputs"]
    assert [item["prompt_ids"] for item in renamed] == [item["prompt_ids"] for item in data["inputs"]]
    assert {item["message_id"] for item in renamed}.isdisjoint(item["message_id"] for item in data["inputs"])
