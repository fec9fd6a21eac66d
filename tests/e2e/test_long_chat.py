"""A chat of 200 long messages costs the browser no more per reply than an empty one."""

from __future__ import annotations

from typing import Any

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


class Meter:
    """Bytes that a tab was sent since `reset`."""

    def __init__(self, tab: ChatPage) -> None:
        self.bytes = 0
        self._network = tab.page.context.new_cdp_session(tab.page)
        self._network.send("Network.enable")
        self._network.on("Network.loadingFinished", self._count)

    def _count(self, event: dict[str, Any]) -> None:
        self.bytes += int(event["encodedDataLength"])

    def reply(self, tab: ChatPage) -> int:
        """Bytes of one turn of `TOKENS` tokens, up to the moment the page is complete."""
        before = self.bytes
        tab.ask("Go on.")
        # The last answer's end is reported in its own time.
        tab.page.wait_for_timeout(300)
        return self.bytes - before


@pytest.fixture
def long_chat(app: AppProcess) -> str:
    text = (FILLER * 20)[:CHARACTERS]
    talk = [("user" if n % 2 == 0 else "assistant", f"Message {n}. {text}") for n in range(MESSAGES)]
    return app.imported(talk, params=PARAMS, title="A long chat")


def test_bytes_of_a_reply(visitor: Visitor, app: AppProcess, long_chat: str) -> None:
    empty = visitor.open(app.session(TOKENS))
    short = Meter(empty).reply(empty)
    app.request("PATCH", f"/api/sessions/{empty.session()}", {"params": {**PARAMS, "max_tokens": 2 * TOKENS}})
    twice = Meter(empty).reply(empty)
    assert twice / short <= 2.5
    tab = visitor.open(long_chat)
    assert tab.count() == MESSAGES
    meter = Meter(tab)
    # The first message after the import reads the whole prompt, which is not what is measured here.
    meter.reply(tab)
    long = meter.reply(tab)
    assert long <= 4 * short, (long, short)
    assert tab.thread.locator(".left-prompt").count() == 1


def test_typing_is_not_held_up(visitor: Visitor, app: AppProcess, long_chat: str) -> None:
    app.request("PATCH", f"/api/sessions/{long_chat}", {"params": {**PARAMS, "max_tokens": 700}})
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
