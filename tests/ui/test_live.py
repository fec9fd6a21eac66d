"""The live route and the acts, with a real store and real turns; only the model is replaced."""

import json
import threading

import pytest

from engine.protocol import Loop
from tests.support.fake_chat import REPLY
from tests.support.page_client import Refused
from ui.live import LivePage, LiveQuery
from ui.reply_html import reply_html


def test_a_first_message_stores_the_chat_and_streams_its_reply(page):
    page.chat.engine.pause_at = 5
    page.send("Hello there", params={"temperature": 0.2}, system_prompt="Be brief.")
    page.poll()
    assert page.running and page.messages[1]["live"]
    page.chat.engine.go_on.set()
    page.until_idle()
    assert [message["role"] for message in page.messages] == ["user", "assistant"]
    assert page.messages[1]["html"] == reply_html(REPLY)
    assert page.messages[1]["stats"]["generated_tokens"] > 10
    assert page.parts["session"]["title"] == "Hello there"
    assert page.parts["session"]["system_prompt"] == "Be brief."
    assert page.parts["session"]["settings"]["temperature"] == 0.2


def test_a_reply_that_is_stored_and_not_yet_running_is_live(page, monkeypatch):
    """The page took it for a whole reply without a text, until it asked again."""
    live, seen, store = LivePage(page.chat), [], page.chat.store.add_message

    def add_message(session_id, parent_id, role, *rest, **options):
        message = store(session_id, parent_id, role, *rest, **options)
        seen.append((role, live.answer(session_id, LiveQuery())))
        return message

    monkeypatch.setattr(page.chat.store, "add_message", add_message)
    page.send("Hello")
    page.until_idle()
    assert [role for role, _ in seen] == ["user", "assistant"]
    answer = seen[1][1]
    assert answer["running"] and answer["branch"]["add"][1]["live"] and "turn" not in answer
    assert not live.answer(page.session, LiveQuery())["running"]


def test_a_turn_that_begins_between_two_looks_is_seen(page, monkeypatch):
    live, find = LivePage(page.chat), page.chat.running
    page.chat.engine.pause_at = 5
    page.send("Hello")
    looks = iter([lambda _: None])
    monkeypatch.setattr(page.chat, "running", lambda session_id: next(looks, find)(session_id))
    answer = live.answer(page.session, LiveQuery())
    assert answer["running"] and answer["branch"]["add"][1]["live"] and answer["turn"]["message"]
    page.chat.engine.go_on.set()
    page.until_idle()


def test_lost_answers_do_not_matter(page):
    page.send("Hello")
    page.poll()
    for number in range(400):
        page.poll(lose=number % 3 != 0)
        if not page.running:
            break
        if page.chat.running(page.session) and number % 3 == 0:
            assert page.live_html == "" or page.live_html[:3] == "<p>"
    page.until_idle()
    assert page.messages[-1]["html"] == reply_html(REPLY)


def test_nothing_new_is_a_short_answer(page):
    page.send("Hello")
    page.until_idle()
    before = page.bytes
    answer = page.poll()
    assert set(answer) == {"running", "since"} and page.bytes - before < 150


def test_a_second_tab_and_a_refresh_see_the_same_reply(page):
    page.chat.engine.pause_at = 5
    page.send("Hello")
    page.poll()
    tab = page.open(page.session)
    tab.poll()
    tab.poll()
    assert tab.running and tab.turn_id == page.chat.running(page.session).id
    page.chat.engine.go_on.set()
    tab.until_idle()
    page.until_idle()
    assert tab.messages == page.messages
    assert len(page.chat.store.list()) == 1


def test_eight_tabs_follow_one_reply(page):
    page.send("Hello")
    tabs = [page.open(page.session) for _ in range(8)]
    threads = [threading.Thread(target=tab.until_idle) for tab in tabs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tab.messages[-1]["html"] == reply_html(REPLY) for tab in tabs)


def test_an_unknown_cursor_gets_everything(page):
    page.send("Hello")
    page.until_idle()
    for since in ("", "nonsense", "a.b.c.d.e.f.g", "......-3", "." * 400):
        tab = page.open(page.session)
        tab.since = since
        tab.poll()
        assert tab.messages == page.messages and tab.parts["session"]["title"] == "Hello"


@pytest.mark.parametrize("session", ["6f1c3f0e-0000-4000-8000-000000000000", "nonsense", "%00", "NEW"])
def test_an_unknown_chat_is_named_without_paths(page, session):
    with pytest.raises(Refused, match="does not exist") as refused:
        page.open(session).poll()
    assert refused.value.status == 404 and "/" not in str(refused.value)
    assert page.chat.store.list() == []


def test_edit_regenerate_and_arrows_only_resend_what_changed(page):
    for text in ("One", "Two", "Three"):
        page.send(text)
        page.until_idle()
    second = page.messages[2]["id"]
    page.act("edit", message=second, content="Two, edited")
    assert page.poll()["branch"]["keep"] == 2
    page.until_idle()
    assert [m.get("text") for m in page.messages] == ["One", None, "Two, edited", None]
    assert (page.messages[2]["version"], page.messages[2]["versions"]) == (2, 2)
    page.act("regenerate", message=page.messages[3]["id"])
    page.until_idle()
    assert page.messages[3]["versions"] == 2
    page.act("select", message=page.messages[2]["previous"])
    assert page.poll()["branch"]["keep"] == 2
    assert [m.get("text") for m in page.messages] == ["One", None, "Two", None, "Three", None]


def test_edited_replies_are_versions_too(page):
    page.send("One")
    page.until_idle()
    page.act("edit_reply", message=page.messages[1]["id"], content="*Mine*")
    page.poll()
    assert page.messages[1]["html"] == "<p><em>Mine</em></p>\n" and page.messages[1]["versions"] == 2
    assert page.act("text", message=page.messages[1]["id"]) == {"text": "*Mine*"}


def test_undo_gives_the_text_back_and_delete_takes_what_follows(page):
    for text in ("One", "Two"):
        page.send(text)
        page.until_idle()
    assert page.act("undo") == {"text": "Two"}
    page.poll()
    assert len(page.messages) == 2
    page.act("delete", message=page.messages[0]["id"])
    page.poll()
    assert page.messages == []


def test_stop_ends_the_reply_and_keeps_its_text(page):
    page.chat.engine.pause_at = 5
    page.send("Hello")
    page.poll()
    assert page.act("stop") == {"stopped": True}
    page.chat.engine.go_on.set()
    page.until_idle()
    assert page.messages[1]["finish"] == "cancelled"
    assert page.act("stop") == {"stopped": False}


def test_fork_rename_delete_and_the_list(page):
    page.send("Blue whales")
    page.until_idle()
    fork = page.open(page.act("fork", message=page.messages[1]["id"])["session"])
    fork.act("update", title="Copy")
    page.poll(sessions=True)
    assert [item["title"] for item in page.parts["sessions"]] == ["Copy", "Blue whales"]
    page.poll(sessions=True, search="whales")
    assert "whales" in page.parts["sessions"][-1]["hit"]
    fork.act("delete_session")
    with pytest.raises(Refused):
        fork.poll()
    assert "sessions" in page.poll(sessions=True) and len(page.parts["sessions"]) == 1


def test_export_and_import_round_trip(page):
    page.send("Hello")
    page.until_idle()
    exported = page.chat.store.export(page.session)
    copy = page.open(page.open("new").act("import", data=exported)["session"])
    copy.poll()
    assert [m.get("text") for m in copy.messages] == [m.get("text") for m in page.messages]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"act": "send", "content": "  "}, "empty"),
        ({"act": "send", "content": "x" * 100_000}, "100000 characters"),
        ({"act": "send"}, "content must be text"),
        ({"act": "send", "content": "a", "params": {"temperature": -1}}, "temperature"),
        ({"act": "send", "content": "a", "params": []}, "params must be an object"),
        ({"act": "send", "content": "word " * 3000}, "tokens"),
        ({"act": "dance"}, "no act named"),
        ({"act": "undo"}, "no messages yet"),
        ({"act": "import", "data": {"format": "other"}}, "not a session export"),
        ({"act": "import", "data": {}}, "not a session export"),
        ({"act": "import", "data": None}, "not a session export"),
        ({}, "act must be text"),
    ],
)
def test_a_refusal_is_one_sentence_and_leaves_nothing_behind(page, body, sentence):
    response = page.http.post("/api/sessions/new/acts", json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert sentence in message and "\n" not in message and message.endswith(".")
    assert page.chat.store.list() == []


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b'"text"', b"[" * 100_000])
def test_bodies_that_are_no_object(page, raw):
    response = page.http.post("/api/sessions/new/acts", content=raw)
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]


def test_acts_during_a_reply_are_refused_and_harm_nothing(page):
    page.chat.engine.pause_at = 5
    page.send("Hello")
    with pytest.raises(Refused, match="still answering") as refused:
        page.act("send", content="Again")
    assert refused.value.status == 409
    page.chat.engine.go_on.set()
    page.act("stop")
    page.until_idle()
    assert len(page.messages) == 2


def test_foreign_messages_are_not_found(page):
    page.send("Hello")
    page.until_idle()
    other = page.open("new")
    other.send("Other")
    other.until_idle()
    for act in ("text", "select", "delete", "regenerate"):
        with pytest.raises(Refused) as refused:
            other.act(act, message=page.messages[0]["id"])
        assert refused.value.status == 404


def test_the_price_before_sending(page):
    page.send("Hello there friend")
    page.until_idle()
    cost = page.act("preview", content="And now?")
    assert cost["reused_tokens"] > 0 and cost["dropped"] == []
    assert cost["prompt_tokens"] > cost["reused_tokens"] and cost["context_limit"] == 2048


def test_turns_that_leave_the_prompt_are_named_before_and_after(page):
    page.chat.engine.max_seq_len = 300
    for number in range(3):
        page.send(f"Question {number}")
        page.until_idle()
    dropped = page.act("preview", content="word " * 60)["dropped"]
    assert dropped == [message["id"] for message in page.messages[: len(dropped)]] and dropped
    page.chat.engine.pause_at = 5
    page.send("word " * 60)
    assert page.poll()["turn"]["dropped"] == len(dropped)
    page.chat.engine.go_on.set()
    page.until_idle()


def test_a_loop_is_told_while_it_is_written_and_afterwards(page):
    loop = {"period": 3, "start": 4, "repeats": 12, "near": False}
    page.send("Hello")
    page.until_idle()
    page.chat.engine.loop = Loop(**loop)
    page.chat.engine.pause_at = 5
    page.send("And again")
    told = []
    while not told:
        told += [turn for turn in [page.poll().get("turn")] if turn and turn["tokens"]]
    page.chat.engine.go_on.set()
    while page.running:
        told += [turn for turn in [page.poll().get("turn")] if turn and turn["tokens"]]
    assert all(turn["loop"] == loop for turn in told)
    assert "loop" not in page.messages[1] and page.messages[3]["loop"] == loop


def test_the_page_works_while_the_model_loads(page):
    page.send("Hello")
    page.until_idle()
    page.chat.engine.state = "loading"
    tab = page.open(page.session)
    tab.poll(panel=True)
    assert tab.parts["app"]["status"] == "loading" and len(tab.messages) == 2
    with pytest.raises(Refused, match="loading"):
        tab.act("send", content="Too early")
    page.chat.engine.state = "ok"
    tab.poll()
    assert tab.parts["app"]["model"]["model"] == "fake-135M"


def test_answers_are_json_without_traces(page, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(page.chat, "send", broken)
    response = page.http.post("/api/sessions/new/acts", json={"act": "send", "content": "x"})
    assert response.status_code == 500 and "secret" not in json.dumps(response.json())
