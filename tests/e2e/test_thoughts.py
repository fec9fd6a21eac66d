"""Leaving earlier thoughts out of the prompt: what it would cost is told before it is switched on, and is true."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.support.app_process import AppProcess, wait_for
from tests.support.chat_page import Visitor

pytestmark = pytest.mark.e2e
REPLY = "<think>\nThe person asks for the capital of France, which is Paris.\n</think>\n\nParis."


def test_the_price_of_thoughts_is_told_before_they_are_left_out(visitor: Visitor, app: AppProcess) -> None:
    session = app.imported(
        [("user", "What is the capital of France?"), ("assistant", REPLY)],
        params={"max_tokens": 4, "temperature": 0.0, "ignore_eos": True},
    )
    app.say(session, "And of Spain?")
    tab = visitor.open(session)
    assert not [url for url in visitor.requests if url.endswith("/price")], "nobody looks at the settings yet"
    tab.tab("Settings")
    thoughts = tab.page.locator("#kv-strip_thoughts")
    price = thoughts.locator(".price-tag")
    wanted = re.compile(r"prompt is (\d+) tokens shorter; the next reply computes (\d+) tokens of the prompt, about")
    expect(price).to_have_text(wanted)
    found = wanted.search(price.inner_text())
    assert found is not None
    saved, computed = map(int, found.groups())
    expect(tab.page.locator("#kv-kv_format .price-tag")).to_have_text(re.compile(r"computes \d+ tokens of the prompt"))

    before = app.request("POST", f"/api/sessions/{session}/price", {"action": "send", "content": "And of Italy?"})
    thoughts.get_by_role("checkbox").check()
    wait_for(lambda: app.request("GET", f"/api/sessions/{session}")["params"].get("strip_thoughts"), "the setting")
    expect(price).to_have_text(re.compile(f"^Sent again, the prompt is {saved} tokens longer"))
    after = app.request("POST", f"/api/sessions/{session}/price", {"action": "send", "content": "And of Italy?"})
    assert before["prompt_tokens"] - after["prompt_tokens"] == saved > 10
    tab.ask("And of Italy?")
    numbers = app.numbers(session)
    assert numbers["computed_tokens"] == after["tokens"] > computed > 0
    assert numbers["miss"]["cause"] == "thoughts"
    tab.tab("Cache")
    expect(tab.panel).to_contain_text("the thoughts of an earlier reply are left out")
