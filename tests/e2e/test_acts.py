"""What a person does to messages and chats: branches, forks, names, search, files, settings."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.app_process import AppProcess, export_of, wait_for
from tests.support.chat_page import ChatPage, Visitor

pytestmark = pytest.mark.e2e
TALK = [
    ("user", "first question"),
    ("assistant", "first answer"),
    ("user", "second question"),
    ("assistant", "said long ago"),
]


@pytest.fixture
def talk(visitor: Visitor, app: AppProcess) -> ChatPage:
    """A tab with a chat of two turns; new replies are four tokens long."""
    tab = visitor.open(app.imported(TALK, params={"max_tokens": 4, "ignore_eos": True, "temperature": 0.0}))
    assert tab.texts() == [content for _, content in TALK]
    return tab


def test_an_edited_message_is_another_branch(talk: ChatPage, app: AppProcess) -> None:
    talk.rewrite(2, "another question")
    wait_for(lambda: talk.texts()[2] == "another question", "the new message")
    talk.idle(4)
    new = talk.texts()
    assert new[:2] == ["first question", "first answer"] and new[3] not in ("", "said long ago")
    assert talk.versions(2) == "2/2"
    talk.step(2, "Older")
    wait_for(lambda: talk.texts() == [content for _, content in TALK], "the old branch")
    assert talk.versions(2) == "1/2"
    talk.step(2, "Newer")
    wait_for(lambda: talk.texts() == new, "the new branch")
    assert [message["content"] for message in app.messages(talk.session())][2] == "another question"


def test_the_first_message_can_be_edited(talk: ChatPage) -> None:
    talk.rewrite(0, "a new beginning")
    talk.idle(2)
    assert talk.texts()[0] == "a new beginning"
    talk.step(0, "Older")
    wait_for(lambda: talk.texts() == [content for _, content in TALK], "the old branch")


def test_an_edited_reply_keeps_the_old_one(talk: ChatPage, app: AppProcess) -> None:
    talk.rewrite(3, "**better** answer")
    wait_for(lambda: talk.texts()[3] == "better answer", "the new text")
    assert talk.versions(3) == "2/2" and app.messages(talk.session())[3]["content"] == "**better** answer"
    talk.step(3, "Older")
    wait_for(lambda: talk.texts()[3] == "said long ago", "the old text")


def test_an_edit_that_is_called_off_changes_nothing(talk: ChatPage, app: AppProcess) -> None:
    talk.act(2, "edit")
    area = talk.thread.locator("> .message").nth(2).locator("textarea")
    area.fill("never sent")
    area.press("Escape")
    assert talk.texts() == [content for _, content in TALK]
    assert [message["content"] for message in app.messages(talk.session())] == talk.texts()


def test_regenerate(talk: ChatPage, app: AppProcess) -> None:
    talk.act(3, "again")
    wait_for(lambda: talk.versions(3) == "2/2" if talk.thread.locator(".versions").count() else False, "a new version")
    talk.idle(4)
    assert talk.texts()[:3] == [content for _, content in TALK][:3] and talk.texts()[3] != "said long ago"
    assert len(app.messages(talk.session())[3]["siblings"]) == 2


def test_undo_puts_the_text_back_into_the_box(talk: ChatPage, app: AppProcess) -> None:
    talk.act(3, "undo")
    talk.idle(2)
    wait_for(lambda: talk.box.input_value() == "second question", "the text in the box")
    assert len(app.messages(talk.session())) == 2
    talk.box.press("Enter")
    talk.idle(4)
    assert talk.texts()[:3] == [content for _, content in TALK][:3]


def test_delete_a_message(talk: ChatPage, app: AppProcess) -> None:
    talk.act(2, "trash")
    talk.page.locator("dialog[open]").get_by_role("button", name="Cancel").click()
    assert talk.count() == 4
    talk.act(2, "trash")
    talk.confirm()
    talk.idle(2)
    assert len(app.messages(talk.session())) == 2


def test_fork_from_a_message(talk: ChatPage, app: AppProcess) -> None:
    old = talk.session()
    fork = talk.thread.locator("> .message").nth(1).locator("[data-act=fork]")
    talk.thread.locator("> .message").nth(1).hover()
    fork.hover()
    expect(fork).to_have_attribute("title", re.compile(r"^Fork the chat from here: computes \d+ tokens of the prompt"))
    talk.act(1, "fork")
    wait_for(lambda: talk.session() != old, "another address")
    talk.idle(2)
    assert talk.texts() == ["first question", "first answer"]
    talk.ask("only in the copy")
    assert len(app.messages(old)) == 4
    talk.page.go_back()
    talk.idle(4)
    assert talk.session() == old and talk.texts() == [content for _, content in TALK]


def test_rename_search_and_delete(talk: ChatPage, app: AppProcess) -> None:
    name = f"Sea {uuid.uuid4().hex}"
    talk.menu("Rename")
    talk.confirm(name)
    expect(talk.title).to_have_text(name)
    assert name in talk.page.title()
    lines = talk.page.locator("#kv-sessions .session")
    talk.page.locator("#kv-search").locator("input, textarea").fill(name.split()[1])
    expect(lines).to_have_count(1)
    expect(lines.locator(".name")).to_have_text(name)
    session = talk.session()
    talk.menu("Delete")
    talk.confirm()
    expect(talk.page.locator("#kv-sessions")).to_contain_text("Nothing found.")
    assert session not in [item["id"] for item in app.request("GET", "/api/sessions")["sessions"]]
    assert talk.page.evaluate("new URL(location.href).searchParams.get('session')") is None


def test_search_finds_a_word_of_a_message(visitor: Visitor, app: AppProcess) -> None:
    word = f"quokka{uuid.uuid4().hex}"
    session = app.imported([("user", f"tell me of the {word}"), ("assistant", "a small animal")])
    tab = visitor.open()
    tab.page.locator("#kv-search").locator("input, textarea").fill(word)
    lines = tab.page.locator("#kv-sessions .session")
    expect(lines).to_have_count(1)
    lines.locator("a").click()
    tab.idle(2)
    assert tab.session() == session


def test_export_and_import(talk: ChatPage, app: AppProcess, tmp_path: Path) -> None:
    saved = {}
    for kind, label in (("json", "Export as JSON"), ("md", "Export as Markdown")):
        with talk.page.expect_download() as download:
            talk.menu(label)
        assert download.value.suggested_filename == f"kvscope-{talk.session()[:8]}.{kind}"
        saved[kind] = tmp_path / f"chat.{kind}"
        download.value.save_as(saved[kind])
    assert "## User\n\nsecond question" in saved["md"].read_text()
    assert [message["content"] for message in json.loads(saved["json"].read_text())["messages"]] == talk.texts()
    old = talk.session()
    talk.page.locator("#kv-sessions input[type=file]").set_input_files(saved["json"])
    wait_for(lambda: talk.session() != old, "the imported chat")
    talk.idle(4)
    assert talk.texts() == [content for _, content in TALK]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("no json", "This file is not a KVScope export: it is not JSON."),
        ('{"format": "other"}', "This is not a session export of KVScope."),
        (json.dumps(export_of(TALK) | {"version": 9}), "This export has version 9; this KVScope reads version 1."),
    ],
)
def test_importing_something_else(visitor: Visitor, tmp_path: Path, content: str, sentence: str) -> None:
    visitor.expect_errors("the server responded with a status of 400")
    tab = visitor.open()
    (tmp_path / "chat.json").write_text(content)
    tab.page.locator("#kv-sessions input[type=file]").set_input_files(tmp_path / "chat.json")
    expect(tab.toasts).to_have_text(sentence)
    assert tab.count() == 0


def test_settings_are_kept_with_the_chat(talk: ChatPage, visitor: Visitor, app: AppProcess) -> None:
    talk.tab("Settings")
    page = talk.page
    page.locator("#kv-system_prompt textarea").fill("Answer in one word.")
    page.locator("#kv-max_tokens").locator("input, textarea").fill("3")
    page.locator("#kv-temperature input[type=number]").fill("0.7")
    page.locator("#kv-temperature input[type=number]").press("Tab")
    page.locator("#kv-seed").locator("input, textarea").fill("42")
    path = f"/api/sessions/{talk.session()}"

    def stored() -> bool:
        session = app.request("GET", path)
        params = session["params"]
        wanted = ("Answer in one word.", 3, 0.7, 42)
        return (
            session["system_prompt"],
            params.get("max_tokens"),
            params.get("temperature"),
            params.get("seed"),
        ) == wanted

    wait_for(stored, "the stored settings", 15)
    other = visitor.open(talk.session())
    other.tab("Settings")
    expect(other.page.locator("#kv-system_prompt textarea")).to_have_value("Answer in one word.")
    expect(other.page.locator("#kv-temperature input[type=number]")).to_have_value("0.7")
    other.ask("go")
    numbers = app.numbers(talk.session())
    assert numbers["generated_tokens"] <= 3 and numbers["seed"] == 42


def test_settings_of_a_new_chat_come_with_its_first_message(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open()
    tab.tab("Settings")
    tab.page.locator("#kv-system_prompt textarea").fill("You are a parrot.")
    tab.page.locator("#kv-max_tokens").locator("input, textarea").fill("2")
    expect(tab.page.locator("#kv-settings")).to_contain_text("Saved with the first message.")
    tab.ask("hello")
    session = app.request("GET", f"/api/sessions/{tab.session()}")
    assert session["system_prompt"] == "You are a parrot." and session["params"]["max_tokens"] == 2
    assert app.numbers(tab.session())["generated_tokens"] <= 2


def test_settings_typed_while_the_controls_are_still_being_filled_count(visitor: Visitor, app: AppProcess) -> None:
    """They stood in the controls and were not taken. Filling is made to last as long as on a busy machine."""
    slowly = (
        "const timer = window.setTimeout; window.setTimeout = (f, ms, ...a) => timer(f, ms === 150 ? 4000 : ms, ...a)"
    )
    visitor.context.add_init_script(slowly)
    tab = visitor.open()
    tab.tab("Settings")
    tab.page.locator("#kv-max_tokens").locator("input, textarea").fill("2")
    expect(tab.page.locator("#kv-settings")).to_contain_text("Saved with the first message.")
    tab.ask("hello")
    assert app.request("GET", f"/api/sessions/{tab.session()}")["params"]["max_tokens"] == 2
