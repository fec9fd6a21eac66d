"""What is stored stays: over restarts, full disks, locked databases, and whatever else is asked for."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

import ui.recorder
from engine.protocol import TokenDelta
from sessions.errors import StoreError, explain
from sessions.models import COMPLETE, INTERRUPTED
from sessions.store import SessionStore
from tests.support.app_process import wait_for
from tests.support.chats import BLOCK, GREEDY, SCRIPTED, TinyChat, finished, tiny_chat
from tests.support.engines import ENDLESS, LONG_CONTEXT
from tests.support.session_store import check_integrity
from ui.api.routes import build_api
from ui.recorder import StorageFailed
from ui.turn import Turn

LONG = "A reply that takes its time. " * 8


class Disk:
    """Makes the store's disk full and empty again, by the error that SQLite gives then."""

    def __init__(self, store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.refused, self.most_refused = False, 0, None
        write = store._database.write

        @contextmanager
        def guarded() -> Iterator[object]:
            if self.full and self.refused != self.most_refused:
                self.refused += 1
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise explain(error) from error
            with write() as db:
                yield db

        monkeypatch.setattr(store._database, "write", guarded)


def http(chat: TinyChat) -> TestClient:
    return TestClient(build_api(chat.service), raise_server_exceptions=False)


def history(chat: TinyChat, session: str) -> list[tuple[str, str, str]]:
    return [(message.id, message.role, message.content) for message in chat.store.branch(session).messages]


# -- restarts, reloads, tabs ----------------------------------------------------------------------------------------


def test_three_turns_are_there_after_reload_and_restart(tmp_path):
    """C31: after a reload or a restart the chat looked empty, or a second session row appeared."""
    with tiny_chat(tmp_path) as chat, http(chat) as api:
        session = api.post("/api/sessions").json()["id"]
        for index in range(3):
            chat.say(session, f"Question {index}", f"Answer {index}<|im_end|>")
        before, cache = api.get(f"/api/sessions/{session}").json(), chat.engine.inspect(session)
        for _ in range(3):
            assert api.get(f"/api/sessions/{session}").json() == before
        assert chat.engine.inspect(session) == cache and cache["cache_pos"] > 100
        assert [item["id"] for item in api.get("/api/sessions").json()["sessions"]] == [session]
    with tiny_chat(tmp_path) as chat, http(chat) as api:
        assert api.get(f"/api/sessions/{session}").json() == before
        assert [item["id"] for item in api.get("/api/sessions").json()["sessions"]] == [session]
        assert chat.engine.inspect(session)["cache_pos"] == 0
        stats = chat.say(session, "Go on").stats
        assert stats.miss.cause == "restart" and stats.miss.tokens_lost == cache["cache_pos"]


def test_what_an_imported_chat_shares_with_the_cache_is_not_lost(tmp_path):
    """All of an import's tokens were told as lost, though the session that it came from has them in the cache."""
    with tiny_chat(tmp_path) as chat:
        session = chat.store.create().id
        for index in range(3):
            last = chat.say(session, f"Question {index}", f"Answer {index}<|im_end|>").stats
        twin = chat.store.import_(chat.store.export(session)).id
        stats = chat.say(twin, "Go on").stats
        assert stats.reused_tokens >= last.cache_pos - BLOCK
        lost = last.cache_pos - stats.reused_tokens
        assert (lost <= 0 and stats.miss is None) or (stats.miss.position, stats.miss.tokens_lost) == (
            stats.reused_tokens,
            lost,
        )


def test_a_reply_that_nobody_follows_is_there_when_finished_once(tmp_path):
    """C31: a reload during a reply lost it, or it came twice."""
    with tiny_chat(tmp_path) as chat, http(chat) as api:
        session = api.post("/api/sessions").json()["id"]
        chat.engine.script.append(chat.ids(LONG + "<|im_end|>"))
        turn = chat.service.send(session, "Long?", SCRIPTED)
        for _ in range(3):
            seen = api.get(f"/api/sessions/{session}").json()
            assert [message["role"] for message in seen["messages"]] == ["user", "assistant"]
            assert LONG.startswith(seen["messages"][1]["content"])
        finished(turn)
        seen = api.get(f"/api/sessions/{session}").json()
        assert [message["content"] for message in seen["messages"]] == ["Long?", LONG] and not seen["running"]


def test_every_token_is_stored_before_the_next_but_one(tmp_path, monkeypatch):
    """A kill in mid-reply lost half a second of text, about twenty tokens; it may lose the one being written."""
    monkeypatch.setattr(ui.recorder, "SLOW_WRITE_S", 10)
    with tiny_chat(tmp_path) as chat:
        session = chat.store.create().id
        chat.engine.script.append(chat.ids(LONG + "<|im_end|>"))
        stored, store_partial = [], ui.recorder._store_partial

        def noted(store: SessionStore, turn: Turn) -> None:
            store_partial(store, turn)
            stored.append(chat.store.message(turn.message_id).content)

        monkeypatch.setattr(ui.recorder, "_store_partial", noted)
        turn = chat.service.send(session, "Long?", SCRIPTED)
        finished(turn)
        texts = [event.text for event in turn._events if isinstance(event, TokenDelta)]
        assert len(texts) > 20 and stored == ["".join(texts[: n + 1]) for n in range(len(texts))]


def test_a_process_that_is_killed_in_mid_reply_keeps_what_was_said(tmp_path, monkeypatch):
    """C31's neighbour: the database as it lies on the disk while a reply streams opens again, the reply once."""
    monkeypatch.setattr(ui.recorder, "WAIT_RATIO", 0)
    copy = tmp_path / "copy"
    copy.mkdir()
    long = LONG * 100
    with tiny_chat(tmp_path, context=LONG_CONTEXT) as chat:
        session = chat.store.create().id
        chat.say(session, "First?", "One.<|im_end|>")
        chat.engine.script.append(chat.ids(long + "<|im_end|>"))
        turn = chat.service.send(session, "Long?", SCRIPTED)
        while len(chat.store.message(turn.message_id).content) < 20:
            turn.wait(turn.view().version, timeout_s=1)
        with chat.store._database.write():  # nobody writes while the files are copied
            for file in tmp_path.glob("chats.db*"):
                shutil.copy(file, copy)
        turn.cancel()
        assert finished(turn).finish_reason == "cancelled"
    with tiny_chat(copy, context=LONG_CONTEXT) as chat:
        assert chat.store.recovered == 1
        messages = chat.store.branch(session).messages
        assert [message.content for message in messages[:3]] == ["First?", "One.", "Long?"]
        assert (messages[3].status, messages[3].finish_reason) == (COMPLETE, INTERRUPTED)
        assert len(messages) == 4 and len(messages[3].content) >= 20 and long.startswith(messages[3].content)
        following = chat.service.send(session, "Go on", GREEDY)
        finished(following)
        chat.assert_parity(following)
        check_integrity(chat.store)


def test_closing_in_mid_reply_stores_what_was_said(tmp_path):
    """C31's neighbour: an orderly end; the next start goes on where it ended."""
    with tiny_chat(tmp_path, context=LONG_CONTEXT) as chat:
        session = chat.store.create().id
        turn = chat.service.send(session, "Long?", ENDLESS)
        turn.wait(1, timeout_s=30)
    said = turn.view()
    assert said.done and said.finish_reason == "cancelled"
    with tiny_chat(tmp_path, context=LONG_CONTEXT) as chat:
        assert chat.store.recovered == 0
        stored = chat.store.message(turn.message_id)
        assert (stored.content, stored.token_ids, stored.status) == (said.text, said.token_ids, COMPLETE)
        following = chat.service.send(session, "Go on", replace(GREEDY, max_tokens=8))
        finished(following)
        chat.assert_parity(following)


@pytest.mark.parametrize("bad", ["0b0e5d0c-0000-4000-8000-000000000000", "nonsense", "..%2f..%2fetc", "%00", "a" * 400])
def test_unknown_and_malformed_ids_get_one_sentence_and_make_no_session(tmp_path, bad):
    """C31: a bad id in the address made a new row or showed a path of the machine."""
    with tiny_chat(tmp_path) as chat, http(chat) as api:
        for method, path, body in (
            ("GET", "", None), ("POST", "/messages", {"content": "x"}), ("GET", "/cache", None), ("DELETE", "", None),
            ("POST", "/regenerate", {}), ("POST", "/fork", {}), ("GET", "/export", None), ("PATCH", "", {"title": "x"}),
        ):  # fmt: skip
            answer = api.request(method, f"/api/sessions/{bad}{path}", json=body)
            assert answer.status_code in (400, 404, 405), (method, path, answer.text)
            assert "/" not in answer.json()["error"]["message"]
        assert chat.store.list() == []


# -- disks that are full, databases that are locked -----------------------------------------------------------------


@pytest.mark.parametrize("room_again", [False, True])
def test_a_disk_that_fills_up_in_mid_reply_costs_at_most_that_reply(tmp_path, monkeypatch, room_again):
    """A full disk ended the stream; the reply must be shown whole, the trouble told, and stored once there is room."""
    monkeypatch.setattr(ui.recorder, "RETRY_S", 0.05)
    with tiny_chat(tmp_path) as chat, http(chat) as api:
        disk = Disk(chat.store, monkeypatch)
        session = chat.store.create().id
        chat.say(session, "First?", "One.<|im_end|>")
        before = history(chat, session)
        chat.engine.script.append(chat.ids(LONG + "<|im_end|>"))
        generate = chat.engine.generate
        disk.most_refused = 1 if room_again else None
        with monkeypatch.context() as patched:
            # Full before the engine begins: the reply must not be over by then.
            patched.setattr(chat.engine, "generate", lambda asked: (setattr(disk, "full", True), generate(asked))[1])
            turn = chat.service.send(session, "Long?", SCRIPTED)
        view = turn.wait(2**62, timeout_s=60)
        assert view.done and view.text == LONG
        if room_again:
            assert disk.refused == 1 and view.error is None and history(chat, session)[-1][2] == LONG
        else:
            assert isinstance(view.error, StorageFailed) and "The disk is full" in str(view.error)
            for method, path, body in (
                ("POST", f"/api/sessions/{session}/messages", {"content": "x"}),
                ("PATCH", f"/api/sessions/{session}", {"title": "x"}),
                ("POST", "/api/sessions", {}),
                ("POST", f"/api/sessions/{session}/fork", {}),
            ):
                answer = api.request(method, path, json=body)
                assert answer.status_code == 507 and answer.json()["error"]["code"] == "storage_failed"
                assert "The disk is full" in answer.json()["error"]["message"]
        assert history(chat, session)[:2] == before and len(history(chat, session)) == 4
        disk.full = False
        wait_for(lambda: history(chat, session)[3][2] == LONG, "the reply in the store")
        following = chat.service.send(session, "And now?", GREEDY)
        finished(following)
        chat.assert_parity(following)
        chat.assert_cache_is_history(following)
    with tiny_chat(tmp_path) as chat:
        assert history(chat, session)[:2] == before and len(history(chat, session)) == 6
        check_integrity(chat.store)


@pytest.mark.parametrize("route", ["session", "openai"])
def test_a_client_gets_the_whole_reply_and_then_the_error(tmp_path, monkeypatch, route):
    """The same over HTTP, streamed: text first, then one error object."""
    with tiny_chat(tmp_path) as chat, http(chat) as api:
        disk = Disk(chat.store, monkeypatch)
        session = chat.store.create().id
        generate = chat.engine.generate

        def fill_up(request):
            disk.full = True
            return generate(request)

        monkeypatch.setattr(chat.engine, "generate", fill_up)
        chat.engine.script.append(chat.ids("Hello.<|im_end|>"))
        if route == "session":
            answer = api.post(f"/api/sessions/{session}/messages", json={"content": "Hi", "stream": True})
        else:
            body = {"messages": [{"role": "user", "content": "Hi"}], "session_id": session, "stream": True}
            answer = api.post("/v1/chat/completions", json=body)
        parts = [json.loads(part.split("data: ")[1]) for part in answer.text.split("\n\n")[:-1]]
        if route == "session":
            text = "".join(part.get("text", "") for part in parts)
        else:
            text = "".join(p["choices"][0]["delta"].get("content", "") for p in parts if "choices" in p)
        assert text == "Hello." and parts[-1]["error"]["code"] == "storage_failed"
        assert "[DONE]" not in answer.text and "/" not in parts[-1]["error"]["message"]


def test_a_locked_database_is_told_and_loses_nothing(tmp_path):
    """Another program holds the database: acts are refused in one sentence, reading goes on, later acts work."""
    with tiny_chat(tmp_path, busy_timeout_s=0.1) as chat, http(chat) as api:
        session = chat.store.create().id
        chat.say(session, "First?", "One.<|im_end|>")
        before = history(chat, session)
        with closing(sqlite3.connect(tmp_path / "chats.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="locked by another program"):
                chat.service.send(session, "Second?", SCRIPTED)
            answer = api.post(f"/api/sessions/{session}/messages", json={"content": "Second?"})
            assert answer.status_code == 507 and "locked" in answer.json()["error"]["message"]
            assert api.get(f"/api/sessions/{session}").status_code == 200
            other.execute("ROLLBACK")
        assert history(chat, session) == before and not chat.service.running(session)
        chat.say(session, "Second?", "Two.<|im_end|>")
        assert [content for _, _, content in history(chat, session)] == ["First?", "One.", "Second?", "Two."]


def test_an_imported_chat_with_any_numbers_can_be_continued(tmp_path):
    """Numbers of a stranger's export were taken for our own, and the next message failed."""
    with tiny_chat(tmp_path) as chat:
        session = chat.store.create().id
        chat.say(session, "First?", "One.<|im_end|>")
        data = chat.store.export(session)
        for stats in ({}, {"cache_pos": None}, {"cache_pos": "many"}, {"cache_pos": -5}):
            data["turns"][0]["stats"] = stats
            imported = chat.store.import_(data).id
            assert chat.say(imported, "Second?", "Two.<|im_end|>").text == "Two."


@pytest.mark.parametrize("length", [99_999, 100_000])
def test_a_very_long_message_gets_one_sentence_and_is_not_stored(tmp_path, length):
    """A message of 100,000 characters is too long; one below that is refused for its tokens, by name."""
    with tiny_chat(tmp_path) as chat, http(chat) as api:
        session = chat.store.create().id
        answer = api.post(f"/api/sessions/{session}/messages", json={"content": "x" * length})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["message"].endswith(".")
        assert str(length) in error["message"] if length == 100_000 else "tokens" in error["message"]
        assert history(chat, session) == [] and chat.say(session, "Hi", "Hello<|im_end|>").text == "Hello"
