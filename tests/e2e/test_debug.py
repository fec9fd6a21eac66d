"""The Debug tab: from a loop to its cure with one click, from a damaged cache to a clean audit, tokens and misses."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from tests.support.app_process import AppProcess
from tests.support.chat_page import ChatPage, Visitor

pytestmark = pytest.mark.e2e
LOOPING = "Say tick tock twenty times: tick tock tick tock tick tock"
PRESS_TWICE = """button => {
    const again = () => button.textContent === "Stop" ? button.click() : requestAnimationFrame(again);
    button.click();
    again();
}"""
"""What it starts may be over before a click from outside arrives."""
TABLES = ("/tokens", "/misses", "/diagnose", "/audit", "/probe", "/cache/map", "/cache/values")


def debug(tab: ChatPage) -> Locator:
    return tab.page.locator("#kv-debug")


def section(tab: ChatPage, title: str) -> Locator:
    heading = tab.page.get_by_role("heading", name=title, exact=True)
    return debug(tab).locator("section", has=heading)


def asked(visitor: Visitor) -> list[str]:
    return [url for url in visitor.requests if "/api/" in url and any(part in url for part in TABLES)]


def test_a_loop_is_diagnosed_and_cured_with_one_click(visitor: Visitor, app: AppProcess) -> None:
    visitor.expect_errors("409 (Conflict)")  # how a stopped diagnosis is answered
    session = app.session(max_tokens=48, seed=7, ignore_eos=False)
    app.say(session, LOOPING)
    loop = app.numbers(session, 1)["loop"]
    tab = visitor.open(session)
    note = tab.thread.locator(".loop-note")
    expect(note).to_contain_text(f"the same {loop['period']} tokens {loop['repeats']} times")
    assert not asked(visitor)
    note.click()
    expect(debug(tab).get_by_label("Reply to look at")).to_have_value(app.messages(session)[1]["id"])
    why = section(tab, "Why does it repeat itself?")
    expect(why.locator(".loop-text")).to_contain_text("tick")

    why.get_by_role("button", name="Diagnose").evaluate(PRESS_TWICE)
    expect(why.get_by_role("status").first).to_have_text("Stopped.")
    why.get_by_role("button", name="Diagnose").click()
    expect(why.locator(".verdict b")).to_have_text("The sampler")
    rows = why.locator(".evidence > li")
    assert rows.first.locator(".tag").inner_text() == "sound"
    expect(rows.filter(has_text="A fresh prefill with the same settings").locator(".tag")).to_have_text("loops")
    # From just before the loop, and where that helps, the whole reply.
    advised = rows.filter(has_text="Advised settings").locator(".tag").all_inner_texts()
    assert advised and set(advised) == {"no loop"}

    why.get_by_role("button", name="Apply and regenerate").click()
    tab.page.wait_for_function("document.querySelector('.versions')?.textContent.trim() === '2/2'")
    tab.idle(2)
    expect(why).to_contain_text("No repetition was noticed")
    expect(tab.thread.locator(".loop-note")).to_have_count(0)
    stored = app.request("GET", f"/api/sessions/{session}")
    assert stored["params"]["temperature"] == 0.7 and stored["params"]["repetition_penalty"] == 1.1
    assert stored["params"]["seed"] == 7 and app.numbers(session, 1)["loop"] is None


def colours(tab: ChatPage) -> list[list[int]]:
    """Red, green and blue of the middle of each cell of the map's fourth row (layer 3)."""
    found: list[list[int]] = tab.page.locator(".audit .heat canvas").evaluate(
        """canvas => {
            const context = canvas.getContext("2d"), cell = canvas.width / 16, row = 3.5 * canvas.height / 30;
            const data = (index) => context.getImageData((index + .5) * cell, row, 1, 1).data;
            return Array.from({ length: 16 }, (_, index) => [...data(index)]);
        }"""
    )
    return found


def test_damage_is_seen_in_the_map_and_repaired(visitor: Visitor, app: AppProcess) -> None:
    session = app.session(max_tokens=8)
    app.say(session, "A damaged cache.")
    tab = visitor.open(session)
    tab.tab("Debug")
    audit = section(tab, "Audit")
    expect(section(tab, "Invariants").locator(".light")).not_to_have_count(0)
    expect(section(tab, "Invariants").locator(".light.bad")).to_have_count(0)
    app.request(
        "POST", "/api/debug/inject", {"session_id": session, "kind": "nan", "layer": 3, "start": 12, "count": 4}
    )
    audit.get_by_role("button", name="Audit").click()
    expect(audit.locator(".faults li")).to_have_text(re.compile(r"nan\s*layer 3\s*positions 12–15"))
    expect(audit).to_contain_text("Layer 3: positions 12 to 15")
    violet = [pixel for pixel in colours(tab) if pixel[2] > 150]
    assert violet and len(violet) < 16, "the damaged positions stand out"

    audit.locator("canvas").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        tab.page.keyboard.press(key)
    expect(audit.locator(".heat-note")).to_have_text(re.compile(r"layer 3 · positions? \d.* what is tolerated; noise"))
    tab.tab("Cache")
    expect(tab.panel.locator(".cells i.faulty")).to_have_count(1)
    expect(tab.panel.locator(".cells i.faulty")).to_have_attribute("title", re.compile("last audit: fault"))
    tab.tab("Debug")

    audit.get_by_role("button", name="Repair").click()
    expect(audit).to_contain_text("cut at position 12")
    expect(audit.locator(".faults li")).to_have_count(0)
    audit.get_by_role("button", name="Audit").click()
    expect(audit).to_contain_text("hold what the model computes anew")
    assert all(pixel[1] > pixel[0] for pixel in colours(tab)), "nothing but green"


def test_tokens_page_by_page_and_one_of_them(visitor: Visitor, app: AppProcess) -> None:
    session = app.session(max_tokens=136)
    app.say(session, "Tell me about the sea.")
    tab = visitor.open(session)
    tab.tab("Debug")
    tokens = section(tab, "Tokens")
    expect(tokens.locator(".token")).to_have_count(128)
    tokens.get_by_role("button", name="Later tokens").click()
    expect(tokens.locator(".token")).to_have_count(8)
    expect(tokens).to_contain_text("128–135 of 136")

    styles = "all => all.map(one => one.getAttribute('style'))"
    shaded = tokens.locator(".token").evaluate_all(styles)
    tokens.get_by_role("button", name="top-1 probability").click()
    assert tokens.locator(".token").evaluate_all(styles) != shaded
    tokens.get_by_role("button", name="Earlier tokens").click()
    expect(tokens.locator(".token")).to_have_count(128)
    tokens.locator(".token").nth(5).click()
    told: dict[str, Any] = app.request("GET", f"/api/sessions/{session}/tokens?start=5&count=1")["tokens"][0]
    detail = tokens.locator(".token-detail")
    expect(detail).to_contain_text(f"{told['token_id']} · {told['position']}")
    expect(detail).to_contain_text(f"block {told['block']}, slot {told['slot']}")
    expect(detail.locator(".others li")).to_have_count(5)
    expect(detail.locator(".others .taken")).to_have_count(1)
    expect(detail).to_contain_text(f"k_cache[0][0][{told['position']}][:10]")
    read = app.request("GET", f"/api/sessions/{session}/cache/probe?start={told['position']}&count=1")["positions"][0]
    shown = detail.locator(".values span")
    expect(shown).to_have_count(10)
    assert [float(value) for value in shown.all_inner_texts()] == pytest.approx(read["values"], abs=0.006)


def test_how_sure_the_model_was_is_drawn_under_a_reply_that_is_complete(visitor: Visitor, app: AppProcess) -> None:
    session = app.session(max_tokens=300)
    tab = visitor.open(session)
    strips = tab.thread.locator(".certainty .plot")
    tab.ask("Tell me about the sea.")
    assert not [url for url in visitor.requests if "/certainty?" in url], "nobody looks at the Debug tab yet"
    tab.tab("Debug")
    expect(strips).to_be_visible()
    told = app.request(
        "GET", f"/api/sessions/{session}/certainty?message_id={app.messages(session)[1]['id']}&columns=256"
    )
    assert (told["total"], len(told["columns"])) == (300, 256)
    for name in ("sure", "unsure"):
        assert (strips.locator(f".{name}").get_attribute("d") or "").count("h1") == 256
    strips.focus()
    caption = tab.thread.locator(".certainty figcaption")
    for column in range(3):
        tab.page.keyboard.press("ArrowRight")
        first, last = told["columns"][column]
        expect(caption).to_contain_text(f"token {first} " if first == last else f"tokens {first}–{last}, mean")
        expect(caption).to_contain_text(f"entropy {told['entropy'][column]:.2f} nats")
    box = strips.bounding_box()
    assert box is not None
    strips.click(position={"x": box["width"] * 0.9, "y": 8})
    chosen = section(tab, "Tokens").locator(".token[aria-selected=true]")
    index = told["columns"][int(256 * 0.9)][0]
    expect(chosen).to_have_attribute("data-index", re.compile(f"^({index - 1}|{index}|{index + 1}|{index + 2})$"))
    expect(section(tab, "Tokens").locator(".token-detail")).to_be_visible()

    tab.send("And about lakes.")
    tab.writing()
    expect(tab.thread.locator(".message.live .certainty")).to_be_hidden()
    tab.idle(4)
    expect(strips).to_have_count(2)
    tab.tab("Cache")
    expect(strips.first).to_be_hidden()
    tab.tab("Debug")
    section(tab, "Tokens").get_by_label("under replies also while the tab is closed").check()
    tab.tab("Cache")
    expect(strips.last).to_be_visible()
    asked_before = [url for url in visitor.requests if "/certainty?" in url]
    assert len(asked_before) == 2, "once for each reply"


def test_misses_are_cards_and_a_hidden_tab_asks_nothing(visitor: Visitor, app: AppProcess) -> None:
    session = app.session(max_tokens=4)
    tab = visitor.open(session)
    tab.ask("How deep is the <b>sea</b>?")
    message = tab.thread.locator("> .message").first
    tab.act(0, "edit")
    message.locator("textarea").fill("How deep is the <i>lake</i>?")
    send = message.locator(".edit-bar .accent")
    send.hover()
    expect(send).to_have_attribute("title", re.compile(r"^Send: computes \d+ tokens of the prompt, about"))
    told = int(re.findall(r"\d+", send.get_attribute("title") or "")[0])
    assert not asked(visitor), "nobody has opened the tab yet"
    send.click()
    tab.page.wait_for_function("document.querySelector('.versions')?.textContent.trim() === '2/2'")
    tab.idle(2)
    assert app.numbers(session, 1)["computed_tokens"] == told
    tab.tab("Debug")
    card = section(tab, "Misses").locator(".miss")
    expect(card).to_have_count(1)
    expect(card).to_contain_text("a message was edited")
    expect(card.locator("code").nth(1)).to_contain_text("b>sea")
    expect(card.locator("code").nth(2)).to_contain_text("i>lake")
    tab.tab("Cache")
    expect(debug(tab)).to_be_hidden()
    before = len(asked(visitor))
    tab.ask("And how wide?")
    assert len(asked(visitor)) == before


def test_an_audit_is_stopped_with_its_button(visitor: Visitor, app: AppProcess) -> None:
    visitor.expect_errors("409 (Conflict)")  # how a stopped audit is answered
    session = app.session(max_tokens=4)
    app.say(session, "A long story of the sea. " * 100)
    tab = visitor.open(session)
    tab.tab("Debug")
    audit = section(tab, "Audit")
    audit.get_by_role("button", name="Audit").evaluate(PRESS_TWICE)
    expect(audit.get_by_role("status")).to_have_text("Stopped.")
    audit.get_by_role("button", name="Audit").click()
    expect(audit).to_contain_text("hold what the model computes anew")


def test_a_copied_row_is_seen_in_the_map_and_read_beside_its_exact_values(visitor: Visitor, app: AppProcess) -> None:
    session = app.session(max_tokens=8, kv_format="int8")
    app.say(session, "Tell me something about keys and values.")
    damage = {"session_id": session, "kind": "shift", "layer": 3, "start": 20, "count": 1, "amount": 1}
    tab = visitor.open(session)
    tab.tab("Debug")
    maps = section(tab, "Cache map")
    maps.get_by_label("What to draw").select_option("k_similarity")
    assert not any("/cache/map" in url for url in visitor.requests), "nothing is drawn unasked"
    maps.get_by_role("button", name="Draw").click()
    expect(maps.get_by_role("status")).to_contain_text("most like its neighbour")
    app.request("POST", "/api/debug/inject", damage)
    maps.get_by_role("button", name="Draw").click()
    expect(maps.get_by_role("status")).to_contain_text("In layer 3 position 20 holds what the one before holds")
    canvas = maps.locator("canvas")
    columns = app.request("GET", f"/api/sessions/{session}/cache/map?what=k_similarity&columns=192")["columns"]
    column = next(index for index, (first, last) in enumerate(columns) if first <= 20 <= last)
    canvas.focus()
    for key in ["ArrowDown"] * 4 + ["ArrowRight"] * column:
        tab.page.keyboard.press(key)
    expect(maps.locator(".heat-note")).to_contain_text("layer 3 · position")
    expect(maps.locator(".heat-note")).to_contain_text("likeness 1.0000")
    tab.page.keyboard.press("Enter")
    detail = maps.locator(".token-detail")
    expect(detail).to_contain_text("Exact values")
    expect(detail).to_contain_text("k_cache[3][0][20]")
    expect(detail).to_contain_text("int8")
    told = app.request("GET", f"/api/sessions/{session}/cache/values?layer=3&position=20")
    shown = [float(text) for text in detail.locator(".pairs div span:not(.quiet)").all_inner_texts()]
    assert len(shown) == 2 * len(told["stored"])
    assert shown[:8] == pytest.approx(told["exact"][:8], abs=0.006)
    assert shown[8:16] == pytest.approx(told["stored"][:8], abs=0.006)


def test_a_block_tells_its_text_and_its_turn(visitor: Visitor, app: AppProcess) -> None:
    session = app.session(max_tokens=8)
    app.say(session, "How many <b>seas</b> are there?")
    app.say(session, "And lakes?")
    tab = visitor.open(session)
    told = app.request("GET", f"/api/sessions/{session}/cache/block?start=16")
    cells, detail = tab.panel.locator(".cells i"), tab.panel.locator(".block-detail")
    expect(detail).to_be_hidden()
    cells.nth(1).hover()
    expect(detail.locator("code")).to_have_text(told["text"].replace("\n", "↵").replace(" ", "·"))
    expect(detail).to_contain_text(f"block {told['id']}, in RAM · tokens 16–31")
    expect(detail).to_contain_text(f"written by turn {told['turn']} of {told['turns']}")
    tab.panel.locator(".cells").focus()
    tab.page.keyboard.press("ArrowRight")
    expect(detail).to_contain_text("tokens 32–")
    tab.page.keyboard.press("ArrowLeft")
    expect(detail).to_contain_text("tokens 16–31")
    tab.page.keyboard.press("Escape")
    expect(detail).to_be_hidden()


def test_the_process_is_drawn_by_part_and_over_time(visitor: Visitor, app: AppProcess) -> None:
    tab = visitor.open()
    memory = tab.panel.locator(".memory")
    expect(memory).to_contain_text("process (RSS)")
    expect(memory).to_contain_text(re.compile(r"-?\d+\.\d % of the resident set is in none of them"))
    told = app.request("GET", "/api/memory")["process"]
    assert abs(told["unexplained"]) <= 0.02 * told["rss"], told
    expect(memory.locator("svg .rss")).to_have_count(1)
    assert "NaN" not in (memory.locator("svg .rss").get_attribute("d") or "NaN")
