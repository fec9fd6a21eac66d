"""What the panel measures: the lengths of turns with the limit they need, and the precision of the cache's format."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.support.app_process import AppProcess, export_of
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_curve_of_lengths_and_the_comparison_are_drawn(
    visit: Callable[..., Visitor], app: AppProcess, scheme: str
) -> None:
    with_turns(app, [*range(40, 400, 12)])
    visitor = visit(app.url, color_scheme=scheme)
    visitor.expect_errors("400 (Bad Request)")
    tab = visitor.open(app.session(max_tokens=12))
    expect(tab.panel.locator(".cdf svg")).to_be_visible()
    found = app.request("GET", "/api/advice")
    limit = tab.panel.locator("section", has_text="Context limit")
    expect(limit).to_contain_text(f"{found['recommended']} tokens")
    expect(limit).to_contain_text(f"--max-seq-len {found['recommended']}")
    line = tab.panel.locator(".cdf .line")
    assert line.get_attribute("d").count("V") == len(found["cdf"])
    assert line.evaluate("node => getComputedStyle(node).stroke") != "none"

    tab.panel.get_by_role("button", name="Compare precision").click()
    expect(tab.toasts).to_contain_text("nothing in this session to compare")
    tab.ask("Count to five.")
    expect(limit).to_contain_text(f"turns{found['turns'] + 1}")
    tab.panel.get_by_label("KV format to compare").select_option("int4")
    tab.panel.get_by_role("button", name="Compare precision").click()
    precision = tab.panel.locator("section", has_text="Compare precision")
    expect(precision).to_contain_text("int4 with fp32", timeout=60_000)
    expect(precision).to_contain_text("The likeliest text")
