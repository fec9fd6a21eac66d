"""The Debug tab's timeline: the last turns as a flame chart, to zoom into and to save."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.e2e.test_debug import section
from tests.support.app_process import AppProcess
from tests.support.chat_page import Visitor

pytestmark = pytest.mark.e2e


def test_the_last_turns_as_a_flame_chart_and_as_a_file(visitor: Visitor, app: AppProcess) -> None:
    session = app.session(max_tokens=12)
    tab = visitor.open(session)
    tab.ask("How deep is the sea?")
    assert not [url for url in visitor.requests if "/trace" in url], "nobody has opened the tab yet"
    tab.tab("Debug")
    timeline = section(tab, "Timeline")
    chart = timeline.locator(".flame")
    expect(chart.locator(".t-turn")).to_have_count(1)
    for name in ("prefill", "decode", "model"):
        expect(chart.locator(f".t-{name}").first).to_be_visible()
    expect(timeline.locator(".flame-sums li")).to_contain_text(
        ["render", "queue", "match", "prefill", "decode", "model"]
    )

    tab.ask("And how wide?")
    timeline.get_by_role("button", name="last turns").click()
    expect(chart.locator(".t-turn")).to_have_count(2)
    chart.locator(".t-decode").last.click()
    note = timeline.locator(".flame-note")
    expect(note).to_contain_text(re.compile(r"decode: .* 11 tokens"))
    # Fewer than tokens where some were guessed ahead.
    steps = int(re.findall(r"(\d+) steps", note.inner_text())[0])
    expect(chart.locator(".t-step")).to_have_count(steps)
    expect(chart.locator(".t-prefill")).to_have_count(0)
    chart.locator(".t-step").nth(1).click()
    expect(chart.locator(".t-step")).to_have_count(1)
    tab.page.keyboard.press("ArrowDown")
    expect(note).to_contain_text(re.compile("(schedule|copy blocks|model): "))
    tab.page.keyboard.press("Escape")
    expect(chart.locator(".t-step")).to_have_count(steps)
    timeline.get_by_role("button", name="zoom out").click()
    expect(chart.locator(".t-turn")).to_have_count(2)

    with tab.page.expect_download() as caught:
        timeline.get_by_role("link", name="Trace").click()
    assert caught.value.suggested_filename == f"kvscope-{session[:8]}.trace.json"
    file = json.loads(caught.value.path().read_text())
    turns = [event for event in file["traceEvents"] if event["name"] == "turn"]
    assert [turn["args"]["generated_tokens"] for turn in turns] == [12, 12]

    other = app.session(max_tokens=4)
    tab.go(other)
    tab.tab("Debug")
    expect(section(tab, "Timeline")).to_contain_text("No turn since the app was started.")
