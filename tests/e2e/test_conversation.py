"""Sending, watching and stopping a reply."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import expect

from tests.support.app_process import AppProcess, wait_for
from tests.support.chat_page import ChatPage, Visitor

pytestmark = pytest.mark.e2e
ENDLESS = 2500
READ_PROBE = """rows => rows.slice(0, 10)
    .map(row => [...row.querySelectorAll('td[class]')].map(cell => Number(cell.title).toFixed(3)))"""
STOPPED_MS = 1000
"""A person's Stop ends the reply within this time; the time an API call takes here comes on top."""


def test_a_reply_grows_while_it_is_written(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=ENDLESS))
    tab.send("Hello")
    first = tab.writing()
    assert tab.writing(len(first) + 1).startswith(first)
    _stop(tab)


def test_a_reply_and_its_numbers_are_shown_as_they_are_stored(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=120))
    tab.ask("Hello")
    stored = app.messages(tab.session())
    assert [message["content"] for message in stored] == ["Hello", stored[1]["content"]]
    assert tab.texts()[1].split() == stored[1]["content"].split()
    numbers = app.numbers(tab.session())
    wait_for(lambda: tab.cache_pos() == numbers["cache_pos"], "the panel's cache_pos")
    # The reply tells how far the cache is by itself; what is in it comes with the next reading.
    told = ("120", str(numbers["computed_tokens"]))
    wait_for(lambda: (tab.tile("generated"), tab.tile("computed")) == told, "the turn's numbers")
    cache = app.request("GET", f"/api/sessions/{tab.session()}/cache")
    wait_for(lambda: tab.panel.locator(".cells i").count() == len(cache["block_table"]), "its blocks")
    assert tab.panel.locator(".uuid").inner_text() == tab.session()


def test_the_probe_shows_what_the_cache_holds(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=6))
    tab.ask("Hi")
    path = f"/api/sessions/{tab.session()}/cache/probe?count=10&dims=10"
    seen: list[list[list[str]]] = []
    for tensor, layer, head in (("k", 0, 0), ("k", 7, 2), ("v", 29, 1)):
        for name, value in (("tensor", tensor), ("layer", str(layer)), ("head", str(head))):
            tab.panel.locator(f"select[data-name={name}]").select_option(value)
        wanted = app.request("GET", f"{path}&tensor={tensor}&layer={layer}&head={head}")["positions"]
        values = [[f"{value:.3f}" for value in row["values"]] for row in wanted]
        assert [len(row) for row in values] == [10] * 10 and values not in seen, "what is shown must tell them apart"
        seen.append(values)
        rows = tab.panel.locator(".probe tbody tr:not(.gap)")
        wait_for(
            lambda rows=rows, values=values: rows.evaluate_all(READ_PROBE) == values, f"{tensor} {layer} {head}", 15
        )


def test_the_second_message_computes_only_itself(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=8))
    tab.ask("Name a colour.")
    before = tab.texts()
    tab.ask("Another one.")
    assert tab.texts()[:2] == before
    numbers = app.numbers(tab.session())
    assert numbers["reused_tokens"] > 0 and numbers["miss"] is None
    wait_for(lambda: tab.tile("reused") == str(numbers["reused_tokens"]), "the reused tokens")


def test_keys_of_the_text_box(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=4))
    tab.box.fill("   ")
    tab.box.press("Enter")
    tab.box.fill("one")
    tab.box.press("Shift+Enter")
    tab.box.type("two")
    assert tab.box.input_value() == "one\ntwo" and tab.count() == 0
    tab.box.press("Enter")
    tab.idle(2)
    assert tab.box.input_value() == ""
    assert app.messages(tab.session())[0]["content"] == "one\ntwo"


def test_a_first_message_makes_a_session_of_the_address(visitor: Visitor, app: AppProcess) -> None:
    count = len(app.request("GET", "/api/sessions")["sessions"])
    tab = visitor.open()
    tab.tab("Settings")
    tab.page.locator("#kv-max_tokens").locator("input, textarea").fill("4")
    tab.box.fill("What is 世界 é 👩‍👩‍👧‍👦 🇫🇷?")
    tab.page.locator("#kv-send").click()
    tab.idle(2)
    assert app.messages(tab.session())[0]["content"] == "What is 世界 é 👩‍👩‍👧‍👦 🇫🇷?"
    assert tab.texts()[0] == "What is 世界 é 👩‍👩‍👧‍👦 🇫🇷?" and app.numbers(tab.session())["generated_tokens"] == 4
    assert len(app.request("GET", "/api/sessions")["sessions"]) == count + 1
    line = tab.page.locator(f"#kv-sessions .session[data-id='{tab.session()}'] a")
    expect(line).to_have_attribute("aria-current", "page")


def test_a_setting_typed_just_before_sending_counts(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=16))
    tab.tab("Settings")
    tab.box.fill("Hello")
    tab.page.locator("#kv-max_tokens").locator("input, textarea").fill("4")
    tab.page.locator("#kv-send").click()
    tab.idle(2)
    assert app.numbers(tab.session())["generated_tokens"] == 4


@pytest.mark.parametrize("stored", [True, False], ids=["stored chat", "new chat"])
def test_a_message_that_is_too_long_stays_in_the_box(visitor: Visitor, app: AppProcess, stored: bool) -> None:
    visitor.expect_errors("the server responded with a status of 400")
    tab = visitor.open(app.session() if stored else None)
    text = "word " * 20_000
    tab.box.fill(text)
    tab.box.press("Enter")
    expect(tab.toasts).to_have_text("The message has 100000 characters; the most is 99999.")
    assert tab.box.input_value() == text and tab.count() == 0
    if stored:
        assert app.messages(tab.session()) == []
        assert tab.ask("short") and tab.count() == 2


@pytest.mark.parametrize("way", ["button", "Esc"])
def test_stop(visitor: Visitor, app: AppProcess, way: str) -> None:
    tab = visitor.open(app.session(max_tokens=ENDLESS))
    tab.send("Tell me a long story.")
    tab.writing(20)
    before = time.monotonic()
    if way == "button":
        tab.page.locator("#kv-stop").click()
    else:
        tab.page.keyboard.press("Escape")
    tab.idle(2)
    # On a machine that does other work too, five times as long is still a Stop that was not waited for in vain.
    assert (time.monotonic() - before) * 1000 < 5 * STOPPED_MS
    stored = app.messages(tab.session())
    assert [message["role"] for message in stored] == ["user", "assistant"]
    assert (stored[1]["status"], stored[1]["finish_reason"]) == ("complete", "cancelled")
    assert tab.texts()[1].split() == stored[1]["content"].split() != []
    assert not app.running(tab.session())
    app.request("PATCH", f"/api/sessions/{tab.session()}", {"params": {"max_tokens": 4}})
    tab.ask("Go on.")
    assert [message["content"] for message in app.messages(tab.session())][:2] == [m["content"] for m in stored]


def test_typing_while_a_reply_streams(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=ENDLESS))
    tab.send("Tell me a long story.")
    tab.writing(5)
    tab.box.type("the next message")
    tab.box.press("Enter")
    expect(tab.toasts).to_have_text("The reply is still being written; stop it first (Esc).")
    assert tab.box.input_value() == "the next message"
    _stop(tab)
    assert tab.box.input_value() == "the next message" and tab.count() == 2


def _stop(tab: ChatPage) -> None:
    tab.page.keyboard.press("Escape")
    tab.idle()


def test_the_panel_counts_along_with_the_reply(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=ENDLESS))
    tab.page.evaluate(
        """() => {
            window.counted = [];
            const value = (selector) => Number(document.querySelector(selector).textContent.replaceAll(/\\D/g, ""));
            const line = document.querySelector("#kv-preview");
            new MutationObserver(() => {
                const tile = value("#kv-panel .tiles div:nth-child(3) b");
                if (!line.textContent.includes("Writing")) return;
                counted.push([value("#kv-preview"), tile, value(".cache-pos b")]);
            }).observe(line, { subtree: true, childList: true, characterData: true });
        }"""
    )
    tab.send("Count to twenty.")
    # A turn that has not reached the engine yet has no numbers at all.
    tab.page.wait_for_function("counted.filter((numbers) => numbers[0]).length > 2")
    _stop(tab)
    counted = [numbers for numbers in tab.page.evaluate("counted") if numbers[0]]
    assert len(counted) > 1
    assert all(written == tile for written, tile, _ in counted)
    assert len({cached - written for written, _, cached in counted}) == 1
