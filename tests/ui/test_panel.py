"""The live panel: its numbers are the engine's, arrive while tokens do, and never bring the chat along."""

import time

import pytest

from tests.support.chats import tiny_chat
from ui.panel import PanelSource, Selection


def with_panel(page, **query):
    """Poll until a reading has arrived."""
    for _ in range(200):
        if "panel" in page.poll(panel=True, **query):
            return page.panel
        time.sleep(0.01)
    raise AssertionError("no reading arrived")


def test_sections_show_what_the_engine_says(page):
    page.send("Hello there", params={"seed": 7})
    page.until_idle()
    panel = with_panel(page)
    cached = len(page.chat.engine.caches[page.session])
    assert panel["cache"]["cache_pos"] == cached
    assert sum(count for _, _, count, *_ in panel["blocks"]) == cached and panel["audit"] is None
    assert [row[0] for row in panel["head"]] == list(range(10))
    assert [row[0] for row in panel["tail"]] == list(range(cached - 10, cached))
    assert len(panel["head"][0]) == 4 + 10 and panel["head"][1][2] == "Hello "
    assert panel["turn"]["finish_reason"] == "stop" and panel["turn"]["seed"] == 7
    assert panel["turn"]["max_new_tokens"] == 2048 - panel["turn"]["prompt_tokens"]
    assert panel["memory"]["weights"] == 141 << 20


def test_what_is_kept_outside_the_pool_is_told(page):
    page.send("Hello there")
    page.until_idle()
    engine = page.chat.engine
    engine.away = {"tier": "disk", "tokens": 1234}
    cache = with_panel(page)["cache"]
    assert cache["away"] == {"tier": "disk", "tokens": 1234} and cache["refused"] is None


def test_effective_max_new_tokens_follow_the_setting(page):
    page.send("Hello", params={"max_tokens": 5})
    page.until_idle()
    assert with_panel(page)["turn"]["max_new_tokens"] == 5


def test_an_edit_shows_the_miss_with_both_tokens(page):
    page.send("Hello big world")
    page.until_idle()
    page.act("edit", message=page.messages[0]["id"], content="Hello small world")
    page.until_idle()
    miss = with_panel(page)["turn"]["miss"]
    assert miss["cause"] == "edit" and (miss["cached_text"], miss["wanted_text"]) == ("big ", "small ")


@pytest.mark.parametrize("stats", [{}, {"prompt_tokens": "many"}, {"miss": {"cause": 1}}])
def test_an_imported_chat_with_odd_numbers_has_all_other_sections(page, stats):
    page.send("Hello there")
    page.until_idle()
    exported = page.chat.store.export(page.session)
    turn = exported["turns"][-1]
    turn["stats"] = turn["stats"] | stats if stats else {}
    copy = page.open(page.act("import", data=exported)["session"])
    panel = with_panel(copy)
    assert panel["turn"] is None and panel["cache"]["cache_pos"] == 0 and panel["memory"]["weights"] == 141 << 20


def test_an_imported_setting_that_is_no_number_counts_as_none(page):
    page.send("Hello there")
    page.until_idle()
    exported = page.chat.store.export(page.session)
    exported["session"]["params"] = {"max_tokens": "many"}
    copy = page.open(page.act("import", data=exported)["session"])
    turn = with_panel(copy)["turn"]
    assert turn["max_new_tokens"] == 2048 - turn["prompt_tokens"]


def test_a_turn_of_a_larger_vocabulary_is_shown(page):
    page.send("Hello there")
    page.until_idle()
    exported = page.chat.store.export(page.session)
    miss = {"position": 1, "cause": "model", "cached_token": 1 << 30, "wanted_token": None, "tokens_lost": 4}
    exported["turns"][-1]["stats"]["miss"] = miss
    copy = page.open(page.act("import", data=exported)["session"])
    assert with_panel(copy)["turn"]["miss"]["cached_text"] == f"id {1 << 30}"


def test_selection_is_followed_and_kept_within_the_model(page):
    page.send("Hello there")
    page.until_idle()
    first = with_panel(page)["head"]
    assert with_panel(page, layer=3, head=1)["head"] != first
    page.chat.engine.capabilities()
    reading = page.chat.engine.probe(page.session, _query(29, 2))
    wanted = [round(value, 3) for value in reading[0]["values"]]
    assert with_panel(page, layer=999, head=999)["head"][0][4:] == wanted


def _query(layer: int, head: int):
    from engine.debugging.protocol import ProbeQuery

    return ProbeQuery("k", layer, head, 0, 10)


def test_a_chat_not_stored_yet_has_model_and_memory(page):
    panel = with_panel(page)
    assert panel["model"]["bytes_per_token"] == 23040 and panel["cache"] is None and panel["blocks"] == []


@pytest.mark.parametrize(("kind", "blocks"), [("mamba2", False), ("bamba", True)])
def test_a_recurrent_model_shows_its_state_and_what_keys_it_has(tmp_path, kind, blocks):
    with tiny_chat(tmp_path, kind=kind) as chat:
        session = chat.store.create().id
        chat.say(session, "Hello there, how are you?")
        panel = PanelSource(chat.service).read(Selection(session, layer=7, head=7))
        assert len(panel["blocks"]) == (-(-panel["cache"]["cache_pos"] // 4) if blocks else 0)
        assert (len(panel["head"]), len(panel["tail"])) == ((10, 10) if blocks else (0, 0))
        state = panel["cache"]["state"]
        assert state["bytes"] == panel["model"]["state_bytes"] and state["last"][-1] == panel["cache"]["cache_pos"]
        assert state["count"] == 2 and panel["memory"]["state_reserved"] == 2 * state["bytes"]
        assert ("formula" in panel["model"]) == blocks


def test_a_chat_with_a_kv_format_of_its_own_shows_what_it_takes_there(tmp_path):
    """The panel told the app's format and bytes per token of every chat."""
    with tiny_chat(tmp_path, kv_format="fp16") as chat:
        session = chat.store.create(params={"kv_format": "fp32"}).id
        chat.service.send(session, "Hello there, how are you?").wait(2**62, timeout_s=60)
        panel = PanelSource(chat.service).read(Selection(session))
        assert panel["model"]["kv_format"] == "fp32"
        assert panel["model"]["bytes_per_token"] == 2 * chat.engine.capabilities()["bytes_per_token"]
        assert panel["model"]["formula"] == "2 × 2 layers × 2 KV heads × 16 × 4 B"
        assert panel["cache"]["bytes_used"] == panel["cache"]["cache_pos"] * panel["model"]["bytes_per_token"] > 0


def test_readings_arrive_during_a_reply_without_the_chat(page):
    for number in range(4):
        page.send(f"Earlier {number}")
        page.until_idle()
    engine, seen = page.chat.engine, []
    engine.pause_at = 5
    page.send("Hello")
    page.poll()
    while page.running:
        answer = page.poll(panel=True)
        if "panel" in answer and page.running:
            assert "branch" not in answer and "sessions" not in answer
            seen.append(answer["panel"]["id"])
        if len(set(seen)) == 1 and engine.pause_at == 5:
            # On to the next halt: a reading of what has not changed does not come.
            engine.pause_at = 15
            engine.go_on.set()
            engine.go_on.clear()
        elif len(set(seen)) >= 2:
            engine.go_on.set()
        time.sleep(0.02)
    assert len(set(seen)) >= 2 and seen == sorted(seen)


def test_a_closed_panel_is_not_computed(page, monkeypatch):
    asked = []
    monkeypatch.setattr(page.chat.engine, "inspect", lambda session_id: asked.append(session_id))
    page.send("Hello")
    page.until_idle()
    assert asked == []


def test_a_second_page_can_start_from_any_reading(page):
    page.send("Hello there")
    page.until_idle()
    with_panel(page)
    tab = page.open(page.session)
    assert with_panel(tab)["blocks"] == page.panel["blocks"]
    assert Selection(page.session) == Selection(page.session, "k", 0, 0)


def test_a_running_turn_tells_where_the_cache_ends_without_a_reading(page, monkeypatch):
    asked = []
    monkeypatch.setattr(page.chat.engine, "inspect", lambda session_id: asked.append(session_id))
    page.chat.engine.pause_at = 5
    page.send("Hello")
    told = []
    while not told or page.running:
        turn = page.poll().get("turn")
        if turn and turn["tokens"]:
            told.append((turn["cache_pos"], turn["tokens"]))
            page.chat.engine.go_on.set()
    assert all(place - count == told[0][0] - told[0][1] for place, count in told) and asked == []
