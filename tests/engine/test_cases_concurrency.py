"""Several callers at the same moment, on one session and on several."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

from fastapi.testclient import TestClient

from engine.errors import Conflict
from sessions.models import COMPLETE
from tests.support.chats import GREEDY, TinyChat, finished, tiny_chat
from tests.support.engines import ENDLESS, LONG_CONTEXT, run, tiny_engine
from tests.support.session_store import check_integrity
from ui.api.routes import build_api

ROUNDS = 30
SHORT = replace(GREEDY, max_tokens=4, top_logprobs=None)


def check_tree(chat: TinyChat, session: str, repeated: int = 0) -> None:
    """Every question has one reply per answer given, every reply is whole, no row is double or half; `repeated`
    answers were to a question that was there already."""
    check_integrity(chat.store)
    data = chat.store.export(session)
    messages = data["messages"]
    assert len({message["id"] for message in messages}) == len(messages)
    assert all(message["status"] == COMPLETE for message in messages)
    roles = Counter(message["role"] for message in messages)
    assert roles["user"] + repeated == roles["assistant"] == len(data["turns"])
    assert {turn["message_id"] for turn in data["turns"]} == {m["id"] for m in messages if m["role"] == "assistant"}


def test_two_tabs_and_a_client_at_once(tmp_path):
    """C20: a second request during the first one ended the process, or left double and half rows."""
    with tiny_chat(tmp_path, context=2048) as chat, TestClient(build_api(chat.service)) as api:
        session = chat.store.create().id
        stateless: set[str] = set()
        outcomes: Counter[str] = Counter()
        trouble: list[object] = []
        start = threading.Barrier(3)

        def tab(name: str) -> None:
            for index in range(ROUNDS):
                start.wait()
                try:
                    finished(chat.service.send(session, f"{name}{index}", SHORT))
                    outcomes["answered"] += 1
                except Conflict as error:
                    assert "still answering" in str(error)
                    outcomes["refused"] += 1
                except BaseException as error:
                    trouble.append(error)

        def client() -> None:
            body = {"messages": [{"role": "user", "content": "c"}], "temperature": 0, "max_tokens": 4}
            for index in range(ROUNDS):
                start.wait()
                asked = body if index % 2 else {**body, "session_id": session}
                answer = api.post("/v1/chat/completions", json=asked)
                if answer.status_code == 200:
                    if index % 2:
                        stateless.add(answer.json()["choices"][0]["message"]["content"])
                    else:
                        outcomes["same question"] += 1
                elif answer.status_code != 409 or answer.json()["error"]["code"] != "session_busy":
                    trouble.append(answer.text)

        threads = [threading.Thread(target=tab, args=("a",)), threading.Thread(target=tab, args=("b",))]
        threads.append(threading.Thread(target=client))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not trouble
        assert outcomes["answered"] > 0 and outcomes["answered"] + outcomes["refused"] == 2 * ROUNDS
        assert len(stateless) == 1
        check_tree(chat, session, max(outcomes["same question"] - 1, 0))
        assert_every_reply_is_that_of_a_fresh_engine(chat, session)
        assert finished(chat.service.send(chat.store.create().id, "And now?", SHORT)).token_count == 4


def assert_every_reply_is_that_of_a_fresh_engine(chat: TinyChat, session: str) -> None:
    stored = {m["id"]: m for m in chat.store.export(session)["messages"]}
    replies = sorted(m["content"] for m in stored.values() if m["role"] == "assistant")
    fresh = tiny_engine(context=2048)
    asked = [request for request in chat.engine.requests if request.session_id == session]
    expected = sorted(run(fresh, replace(request, session_id=None))[-1].text for request in asked)
    fresh.close()
    assert replies == expected


def test_an_edit_while_a_reply_streams_is_refused_and_changes_nothing(tmp_path):
    """C20: an edit during a reply cut the cache under it, or put the reply below the wrong message."""
    with tiny_chat(tmp_path, context=LONG_CONTEXT) as chat, TestClient(build_api(chat.service)) as api:
        session = chat.store.create().id
        finished(chat.service.send(session, "First?", SHORT))
        first_id, reply_id = (message.id for message in chat.store.branch(session).messages)
        turn = chat.service.send(session, "Second?", ENDLESS)
        turn.wait(1, timeout_s=30)
        acts = [
            ("PUT", f"/messages/{first_id}", {"content": "Other?"}),
            ("POST", "/messages", {"content": "Third?"}),
            ("POST", "/regenerate", {}),
            ("POST", "/undo", {}),
            ("POST", "/fork", {"message_id": reply_id}),
        ]
        for method, path, body in acts:
            answer = api.request(method, f"/api/sessions/{session}{path}", json=body)
            assert answer.status_code == 409 and answer.json()["error"]["code"] == "session_busy", (path, answer.text)
        other = chat.service.send(chat.store.create().id, "Elsewhere?", SHORT)
        assert finished(other).token_count == 4
        assert api.post(f"/api/sessions/{session}/stop").json() == {"stopped": True}
        view = finished(turn)
        assert view.finish_reason == "cancelled" and 0 < view.token_count < LONG_CONTEXT - 1000
        assert chat.store.message(turn.message_id).content == view.text
        edited = chat.service.edit(session, first_id, "Other?", GREEDY)
        finished(edited)
        chat.assert_parity(edited)
        chat.assert_cache_is_history(edited)
        check_tree(chat, session)


def test_deleting_a_session_under_its_reply_ends_it_cleanly(tmp_path):
    """C20's neighbour: the reply's thread wrote into a session that was gone."""
    with tiny_chat(tmp_path, context=LONG_CONTEXT) as chat:
        kept, session = chat.store.create().id, chat.store.create().id
        turn = chat.service.send(session, "Long?", ENDLESS)
        turn.wait(1, timeout_s=30)
        chat.service.delete_session(session)
        assert turn.view().done
        finished(chat.service.send(kept, "And here?", SHORT))
        check_tree(chat, kept)
        assert [summary.id for summary in chat.store.list()] == [kept]
        assert chat.engine.inspect(session)["cache_pos"] == 0
