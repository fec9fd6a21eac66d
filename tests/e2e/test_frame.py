"""What surrounds the chat: no network needed, narrow screens, light and dark, keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Route, expect

from tests.support.app_process import AppProcess, wait_for
from tests.support.chat_page import Visitor

pytestmark = pytest.mark.e2e
WIDTHS = ((1440, 900), (1000, 800), (390, 844))
SHADES = """(() => {
    const style = getComputedStyle(document.querySelector('#kv-right'));
    const shade = (colour) => {
        const [red, green, blue, alpha = 1] = colour.match(/[\\d.]+/g).map(Number);
        return alpha < 1 ? 'nothing' : red + green + blue > 384 ? 'light' : 'dark';
    };
    return `${shade(style.color)} on ${shade(style.backgroundColor)}`;
})()"""
"""The text's and the background's."""


def test_a_whole_session_asks_nothing_of_the_outside(visit: Callable[..., Visitor], app: AppProcess) -> None:
    visitor = visit(app.url)
    away: list[str] = []

    def pass_own(route: Route) -> None:
        if route.request.url.startswith(app.url):
            route.continue_()
        else:
            away.append(route.request.url)
            route.abort()

    visitor.context.route("**/*", pass_own)
    tab = visitor.open(app.session(max_tokens=6))
    tab.ask("Write $x^2$ and `code`.")
    tab.tab("Settings")
    tab.tab("Cache")
    tab.rewrite(
        1, "$$\\frac{a}{b}$$\n\n```python\nprint(1)\n```\n\n| a |\n|---|\n| 1 |\n\n![x](http://example.com/x.png)"
    )
    expect(tab.thread.locator("math, .katex")).not_to_have_count(0)
    tab.page.reload()
    tab.ready()
    tab.idle(2)
    assert away == [] and len(visitor.requests) > 10


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_widths(visit: Callable[..., Visitor], app: AppProcess, width: int, height: int) -> None:
    """The chat is what one sees first; nothing sticks out; every part can be reached."""
    visitor = visit(app.url, viewport={"width": width, "height": height}, has_touch=width < 500)
    tab = visitor.open(app.imported([("user", "x" * 300), ("assistant", "```\n" + "y" * 400 + "\n```")]))
    app.request("PATCH", f"/api/sessions/{tab.session()}", {"params": {"max_tokens": 3, "ignore_eos": True}})
    tab.box.fill("hello")
    tab.page.locator("#kv-send").click()
    tab.idle(4)
    sticks_out = "() => document.documentElement.scrollWidth > innerWidth || document.body.scrollWidth > innerWidth"
    assert not tab.page.evaluate(sticks_out)
    box = tab.page.locator("#kv-composer").bounding_box()
    assert box["y"] + box["height"] <= height and box["x"] >= 0 and box["x"] + box["width"] <= width
    if width < 1100:
        expect(tab.panel).not_to_be_in_viewport()
        tab.page.get_by_role("button", name="Cache and settings").click()
        expect(tab.panel).to_be_in_viewport()
        expect(tab.panel.locator(".tiles")).to_be_visible()
        tab.page.get_by_role("button", name="Close the panel").click()
        expect(tab.panel).not_to_be_in_viewport()
    if width < 1180:
        tab.page.get_by_role("button", name="Chats", exact=True).click()
        line = tab.page.locator(f"#kv-sessions .session[data-id='{tab.session()}']")
        expect(line).to_be_in_viewport()
        tab.page.keyboard.press("Escape")
        expect(line).not_to_be_in_viewport()
    assert not tab.page.evaluate(sticks_out)


def test_dark_and_light_are_remembered(visitor: Visitor) -> None:
    tab = visitor.open()
    toggle = tab.page.get_by_role("button", name="Light or dark")
    tab.page.wait_for_function(f"{SHADES} === 'dark on light'")
    for shades in ("light on dark", "dark on light"):
        toggle.click()
        tab.page.wait_for_function(f"{SHADES} === '{shades}'")
        tab.page.reload()
        tab.ready()
        tab.page.wait_for_function(f"{SHADES} === '{shades}'")
        # Gradio sets the system's choice once it has started.
        tab.page.wait_for_timeout(2000)
        assert tab.page.evaluate(SHADES) == shades


def test_the_panel_can_be_put_away(visitor: Visitor) -> None:
    tab = visitor.open()
    toggle = tab.page.get_by_role("button", name="Cache and settings")
    toggle.click()
    expect(tab.panel).to_be_hidden()
    tab.page.reload()
    tab.ready()
    expect(tab.panel).to_be_hidden()
    toggle.click()
    expect(tab.panel).to_be_visible()


def test_keys(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session())
    tab.page.locator("#kv-search").locator("input, textarea").focus()
    tab.page.keyboard.press("Control+k")
    expect(tab.box).to_be_focused()
    tab.menu("Rename")
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator("dialog[open]")).to_have_count(0)
    assert app.request("GET", f"/api/sessions/{tab.session()}")["title"] == tab.title.inner_text()


def test_the_chat_template_can_be_picked(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open(app.session())
    tab.page.get_by_role("tab", name="Settings").click()
    template = tab.page.get_by_label("Chat template")
    expect(template).to_have_value("model")
    try:
        template.select_option("plain")
        wait_for(lambda: app.request("GET", "/api/template")["name"] == "plain", "another template")
        tab.page.reload()
        tab.page.get_by_role("tab", name="Settings").click()
        expect(template).to_have_value("plain")
    finally:
        app.request("PUT", "/api/template", {"name": "model"})
    expect(template).to_have_value("model")


def test_what_the_model_lacks_is_told(visitor: Visitor) -> None:
    warning = "The model file has no chat template; prompts are rendered by plain."

    def add_warning(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        if "model" in body.get("app", {}):
            body["app"]["model"]["warnings"] = [warning]
        route.fulfill(response=answer, json=body)

    visitor.context.route("**/live?*", add_warning)
    tab = visitor.open()
    expect(tab.page.locator("#kv-header .notice.warn")).to_contain_text(warning)
    tab.page.get_by_role("button", name="Dismiss").click()
    tab.page.get_by_role("tab", name="Settings").click()
    expect(tab.page.locator("#kv-template")).to_contain_text(warning)
