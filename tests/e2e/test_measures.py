"""What the panel measures: the lengths of turns with the limit they need, and the precision of the cache's format."""

from __future__ import annotations

import re
import uuid

import pytest
from playwright.sync_api import expect

from tests.support.app_process import AppProcess, export_of, wait_for
from tests.support.chat_page import Visitor

pytestmark = pytest.mark.e2e


def with_turns(app: AppProcess, lengths: list[int]) -> None:
    """A chat from elsewhere whose replies had these lengths."""
    data = export_of([("user", "a"), ("assistant", "b")], title="Lengths")
    reply = data["messages"][1]
    data["turns"] = [
        {"id": str(uuid.uuid4()), "message_id": reply["id"], "model": "m", "created_at": reply["created_at"],
         "stats": {"prompt_tokens": length - 10, "generated_tokens": 10}}
        for length in lengths
    ]  # fmt: skip
    app.request("POST", "/api/sessions/import", data)


def test_the_curve_of_lengths_and_the_comparison_are_drawn(visitor: Visitor, app: AppProcess) -> None:
    # So many that those of other chats do not count.
    with_turns(app, [*range(40, 400, 12)] * 40)
    visitor.expect_errors("400 (Bad Request)")
    tab = visitor.open(app.session(max_tokens=12))
    expect(tab.panel.locator(".cdf svg")).to_be_visible()
    found = app.request("GET", "/api/advice")
    limit = tab.panel.locator("section", has_text="Context limit")
    expect(limit).to_contain_text(f"{found['recommended']:,} tokens")
    expect(limit).to_contain_text(f"--max-seq-len {found['recommended']}")
    line = tab.panel.locator(".cdf .line")
    assert line.get_attribute("d").count("V") == len(found["cdf"])
    strokes = set()
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        tab.page.reload()
        tab.ready()
        strokes.add(line.evaluate("node => getComputedStyle(node).stroke"))
    assert "none" not in strokes and len(strokes) == 2, "a colour of its own on each ground"

    tab.panel.get_by_role("button", name="Compare precision").click()
    expect(tab.toasts).to_contain_text("nothing in this session to compare")
    tab.ask("Count to five.")
    expect(limit).to_contain_text(f"turns{found['turns'] + 1:,}")
    tab.panel.get_by_label("KV format to compare").select_option("int4")
    tab.panel.get_by_role("button", name="Compare precision").click()
    precision = tab.panel.locator("section", has_text="Compare precision")
    expect(precision).to_contain_text("int4 with fp32", timeout=60_000)
    expect(precision).to_contain_text("The likeliest text")
    expect(precision).to_contain_text("an fp16 cache, for comparison")


def test_a_system_prompt_is_frozen_and_thawed(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session(max_tokens=4))
    tab.page.get_by_role("tab", name="Settings").click()
    button = tab.page.get_by_role("button", name="Freeze this system prompt")
    expect(button).to_be_disabled()
    text = f"You keep the lighthouse {uuid.uuid4()} and write down the weather each evening."
    tab.page.get_by_label("System prompt").fill(text)
    button.click()
    expect(tab.page.locator("#kv-frozen")).to_contain_text("tokens are kept", timeout=30_000)
    (entry,) = app.request("GET", "/api/frozen")["frozen"]
    row = tab.page.locator(".frozen-list li", has_text=entry["name"])
    expect(row).to_contain_text(f"{entry['tokens']} tokens")
    row.get_by_role("button").click()
    expect(row).to_have_count(0)
    assert app.request("GET", "/api/frozen")["frozen"] == []


def test_a_chat_is_kept_in_the_format_that_is_chosen_for_it(visitor: Visitor, app: AppProcess) -> None:
    session = app.session(max_tokens=4)
    tab = visitor.open(session)
    tab.ask("Name a colour.")
    own = app.request("GET", f"/api/sessions/{session}/cache")
    tab.page.get_by_role("tab", name="Settings").click()
    tab.page.get_by_label("KV cache format").click()
    tab.page.get_by_role("option", name="int8").click()
    wait_for(lambda: app.request("GET", f"/api/sessions/{session}")["params"].get("kv_format") == "int8", "the setting")
    told = tab.page.locator(".settings-foot [role=status]")
    expect(told).to_have_text(re.compile(r"^Saved for this chat: its next reply computes \d+ tokens of the prompt"))
    tab.page.get_by_role("tab", name="Cache").click()
    tab.ask("Name another one.")
    report = app.request("GET", f"/api/sessions/{session}/cache")
    assert report["kv_format"] == "int8" != own["kv_format"]
    assert report["bytes_per_token"] < own["bytes_per_token"] and all(report["invariants"].values())
    expect(tab.panel).to_contain_text("the chat is kept in another KV format now")
