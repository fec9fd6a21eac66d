"""The chat belongs to the address: refresh, more tabs, links, and addresses that name nothing."""

from __future__ import annotations

import uuid

import pytest
from playwright.sync_api import expect

from tests.support.app_process import AppProcess, wait_for
from tests.support.chat_page import Visitor

pytestmark = pytest.mark.e2e
ENDLESS = 3900
NO_CHATS = ("00000000-0000-4000-8000-000000000000", "no-uuid", "../../etc/passwd", "%00", "<b>x</b>", "..", "x" * 3000)


def test_refresh_while_a_reply_is_written(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=600))
    tab.send("Tell me about the sea.")
    tab.writing(3)
    session = tab.session()
    tab.page.reload()
    tab.ready()
    tab.idle(2)
    stored = app.messages(session)
    assert tab.session() == session and len(stored) == 2
    numbers = app.numbers(session)
    assert numbers["generated_tokens"] == 600 and stored[1]["status"] == "complete"
    assert tab.texts()[1].split() == stored[1]["content"].split()
    tab.page.reload()
    tab.ready()
    tab.idle(2)
    wait_for(lambda: tab.cache_pos() == numbers["cache_pos"], "the panel's cache_pos")


def test_refresh_keeps_a_text_that_is_not_sent_yet(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session())
    tab.box.fill("a thought that is not finished")
    tab.page.reload()
    tab.ready()
    expect(tab.box).to_have_value("a thought that is not finished")


def test_a_second_tab_shows_new_turns(visitor: Visitor, app: AppProcess) -> None:
    # Long enough that a tab which looks every two seconds sees it being written.
    session = app.session(max_tokens=1000)
    first, second = visitor.open(session), visitor.open(session)
    first.send("Say something.")
    second.writing(1)
    first.idle(2)
    second.idle(2)
    assert second.texts() == first.texts()
    app.request("PATCH", f"/api/sessions/{session}", {"params": {"max_tokens": 4}})
    second.ask("And now from here.")
    first.idle(4)
    assert first.texts() == second.texts()


def test_the_second_of_two_messages_at_once_is_refused(visitor: Visitor, app: AppProcess) -> None:
    visitor.expect_errors("the server responded with a status of 409")
    session = app.session(max_tokens=ENDLESS)
    first, second = visitor.open(session), visitor.open(session)
    for tab, text in ((first, "one"), (second, "two")):
        tab.box.fill(text)
    send = "() => window.kvscope.send()"
    first.page.evaluate(send)
    second.page.evaluate(send)
    first.writing()
    second.writing()
    expect(second.toasts.or_(second.thread.get_by_text("one", exact=True)).first).to_be_visible()
    second.page.keyboard.press("Escape")
    first.idle(2)
    second.idle(2)
    assert [message["role"] for message in app.messages(session)] == ["user", "assistant"]
    kept = {first.box.input_value(), second.box.input_value()}
    assert kept in ({"", "one"}, {"", "two"}), "the refused message must still be in its box"


def test_eight_tabs_while_one_streams(visitor: Visitor, app: AppProcess) -> None:
    busy = visitor.open(app.session(max_tokens=ENDLESS))
    busy.send("Tell me a very long story.")
    busy.writing()
    talks = [app.imported([("user", f"question {n}"), ("assistant", f"answer {n}")]) for n in range(6)]
    tabs = [visitor.open(session) for session in talks]
    twin = visitor.open(busy.session())
    for n, (tab, session) in enumerate(zip(tabs, talks, strict=True)):
        assert (tab.session(), tab.texts()) == (session, [f"question {n}", f"answer {n}"])
    twin.writing()
    twin.page.locator("#kv-stop").click()
    twin.idle(2)
    busy.page.bring_to_front()
    busy.idle(2)
    assert app.messages(busy.session())[1]["finish_reason"] == "cancelled"
    assert busy.texts() == twin.texts()


def test_switching_chats_while_one_streams(visitor: Visitor, app: AppProcess) -> None:
    other = app.imported([("user", "quiet question"), ("assistant", "quiet answer")], title=f"Quiet {uuid.uuid4().hex}")
    tab = visitor.open(app.session(max_tokens=ENDLESS))
    busy = tab.session()
    tab.send("Tell me a long story.")
    tab.writing()
    tab.page.locator(f"#kv-sessions .session[data-id='{other}'] a").click()
    tab.idle(2)
    assert tab.texts() == ["quiet question", "quiet answer"]
    assert app.running(busy), "looking at another chat must not end the reply"
    tab.page.go_back()
    tab.writing()
    assert tab.session() == busy
    tab.page.keyboard.press("Escape")
    tab.idle(2)


def test_an_address_that_names_no_chat(visitor: Visitor, app: AppProcess) -> None:
    visitor.expect_errors("the server responded with a status of 4")
    count = len(app.request("GET", "/api/sessions")["sessions"])
    tab = visitor.open()
    for name in NO_CHATS:
        tab.page.goto(f"{app.url}/?session={name}")
        tab.ready()
        tab.page.wait_for_function("!new URL(location.href).searchParams.has('session')")
        assert tab.count() == 0, name
        content = tab.page.content()
        assert not any(part in content for part in ("Traceback", "/home/", str(app.data_dir))), name
        expect(tab.page.locator("#kv-chat .welcome"), name).to_be_visible()
    assert len(app.request("GET", "/api/sessions")["sessions"]) == count


def test_a_chat_deleted_in_another_tab(visitor: Visitor, app: AppProcess) -> None:
    visitor.expect_errors("the server responded with a status of 404")
    tab = visitor.open(app.imported([("user", "hello"), ("assistant", "hi")]))
    app.request("DELETE", f"/api/sessions/{tab.session()}")
    expect(tab.toasts).to_contain_text("does not exist")
    assert tab.count() == 0
    wait_for(lambda: "session=" not in tab.page.url, "an address without the chat")
