"""A chat of 200 long messages costs the browser no more per reply than an empty one."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.support.app_process import AppProcess
from tests.support.chat_page import ChatPage, Visitor

pytestmark = pytest.mark.e2e
TOKENS = 40
MESSAGES = 200
CHARACTERS = 1500
FILLER = "Some **text** with `code` and $x^2$, a list:\n\n- one\n- two\n\n```python\nprint('a line of code')\n```\n\n"
PARAMS = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
TYPED = 40
REST = """(() => {
    const log = document.querySelector('#kv-chat .log');
    return log.scrollHeight - log.scrollTop - log.clientHeight;
})()"""
LATENCY = """text => new Promise((done) => {
    const box = document.querySelector('#kv-prompt textarea'), times = [];
    const type = () => {
        if (times.length === text.length) return done(times);
        const before = performance.now();
        box.value += text[times.length];
        box.dispatchEvent(new Event('input', {bubbles: true}));
        requestAnimationFrame(() => { times.push(performance.now() - before); setTimeout(type, 30); });
    };
    type();
})"""


NOTE_ANSWERS = """() => {
    const plain = window.fetch;
    window.answers = [];
    window.fetch = async (...asked) => {
        const response = await plain(...asked);
        const text = await response.clone().text();
        if (new URL(response.url).pathname.endsWith("/live")) {
            const { turn, branch } = JSON.parse(text);
            const added = [turn?.add, branch?.add].filter(Boolean).map((part) => JSON.stringify(part).length);
            answers.push([text.length, added.reduce((sum, length) => sum + length, 0)]);
        } else answers.push([text.length, text.length]);
        return response;
    };
}"""


def read_reply(tab: ChatPage) -> tuple[float, float, float]:
    """Characters that the page gets during a turn: in the longest answer, in an answer on average, and in all of them
    together of the conversation or by another route. How often it looks for what is new is a matter of time, and with
    it the sum of all."""
    tab.page.evaluate("answers.length = 0")
    tab.ask("Go on.")
    # The last answer's end is reported in its own time.
    tab.page.wait_for_timeout(300)
    answers = tab.page.evaluate("answers")
    whole = [characters for characters, _ in answers]
    return max(whole), sum(whole) / len(whole), sum(added for _, added in answers)


@pytest.fixture
def long_chat(app: AppProcess) -> str:
    text = (FILLER * 20)[:CHARACTERS]
    talk = [("user" if n % 2 == 0 else "assistant", f"Message {n}. {text}") for n in range(MESSAGES)]
    return app.imported(talk, params=PARAMS, title="A long chat")


def test_bytes_of_a_reply(visitor: Visitor, app: AppProcess, long_chat: str) -> None:
    empty, long = visitor.open(app.session(TOKENS)), visitor.open(long_chat)
    for tab in (empty, long):
        tab.page.evaluate(NOTE_ANSWERS)
    short = read_reply(empty)
    app.request("PATCH", f"/api/sessions/{empty.session()}", {"params": {**PARAMS, "max_tokens": 2 * TOKENS}})
    assert read_reply(empty)[2] <= 2.5 * short[2]
    assert long.count() == MESSAGES
    # The first message after the import reads the whole prompt, which is not what is measured here.
    read_reply(long)
    found = read_reply(long)
    assert all(more <= 4 * few for more, few in zip(found, short, strict=True)), (found, short)
    assert long.thread.locator(".left-prompt").count() == 1


def test_typing_is_not_held_up(visitor: Visitor, app: AppProcess, long_chat: str) -> None:
    app.request("PATCH", f"/api/sessions/{long_chat}", {"params": {**PARAMS, "max_tokens": 2500}})
    tab = visitor.open(long_chat)
    tab.send("Go on.")
    tab.writing()
    times = sorted(tab.page.evaluate(LATENCY, "x" * TYPED))
    assert app.running(long_chat), "every key must be drawn while the reply is streaming"
    assert times[TYPED // 2] < 1000, times
    tab.page.keyboard.press("Escape")
    tab.idle()
    assert tab.box.input_value() == "x" * TYPED


def test_a_long_chat_stays_at_its_end_and_lets_go(visitor: Visitor, app: AppProcess, long_chat: str) -> None:
    tab = visitor.open(long_chat)
    to_end = tab.page.get_by_role("button", name="To the newest message")
    tab.page.wait_for_function(f"{REST} < 80")
    app.say(long_chat, "Go on.")
    tab.idle(MESSAGES + 2)
    tab.page.wait_for_function(f"{REST} < 80")
    expect(to_end).to_be_hidden()
    tab.page.locator("#kv-chat .log").hover()
    tab.page.mouse.wheel(0, -3000)
    tab.page.wait_for_function(f"{REST} > 1000")
    app.say(long_chat, "Go on.")
    tab.idle(MESSAGES + 4)
    assert tab.page.evaluate(REST) > 1000, "who reads further up is not taken to the end"
    to_end.click()
    tab.page.wait_for_function(f"{REST} < 80")
