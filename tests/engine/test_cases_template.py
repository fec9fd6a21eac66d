"""What a chat template does to the prompt's head and to earlier replies, and what that costs the cache."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from fastapi.testclient import TestClient

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import GenerateRequest
from engine.sequence import Sequence
from engine.tokenizer import ChatTokenizer
from engine.turns.miss import find_miss
from tests.support import tiny_tokenizer as tiny
from tests.support.chats import BLOCK, GREEDY, finished, tiny_chat
from ui.api.routes import build_api

EMPTY_THOUGHT = tiny.QWEN3.replace("enable_thinking is defined and enable_thinking is false", "true")
CLOCK = "{{ '<|im_start|>system\nIt is ' + strftime_now('%Y-%m-%d %H:%M:%S') + '<|im_end|>\n' }}" + tiny.CHATML
ZONE = timezone(timedelta(hours=2))


@pytest.mark.parametrize("thinking", [True, False])
def test_stripped_thinking_cuts_the_cache_at_its_start(tmp_path, thinking):
    """C04: a template dropped earlier thinking; the cache then missed from the start, or kept ids of the thinking."""
    thought = "<think>\n" + "hm, " * 25 + "\n</think>\n\n" if thinking else ""
    with tiny_chat(tmp_path, context=1024, template=tiny.QWEN3 if thinking else EMPTY_THOUGHT) as chat:
        session = chat.store.create().id
        chat.say(session, "What is the capital of France?", thought + "Paris.<|im_end|>")
        first = chat.engine.requests[-1].prompt_ids
        think_start = len(first) if thinking else len(first) - len(chat.ids("<think>\n\n</think>\n\n"))
        chat.engine.script.append(chat.ids(thought.replace("hm", "so") + "Madrid.<|im_end|>"))
        second_turn = chat.service.send(session, "And Spain?", replace(GREEDY, max_tokens=None, ignore_eos=False))
        stats = finished(second_turn).stats
        second = chat.engine.requests[-1].prompt_ids
        assert stats.reused_tokens == think_start
        added = "Paris.E\nSuser\nAnd Spain?E\nSassistant\n" + ("" if thinking else "T\n\nT\n\n")
        assert stats.computed_tokens == len(second) - think_start <= len(added) + BLOCK
        assert (stats.miss.position, stats.miss.cause) == (think_start, "template")
        assert (stats.miss.cached_token, stats.miss.wanted_token) == (chat.ids("<think>")[0], chat.ids("P")[0])
        chat.assert_parity(second_turn)
        chat.assert_cache_is_history(second_turn)

        third_turn = chat.service.send(session, "And Italy?", GREEDY)
        stats = finished(third_turn).stats
        assert stats.reused_tokens == len(second) - (0 if thinking else 6)
        assert stats.miss.position == stats.reused_tokens
        assert chat.prompt_text().count("<think>") == (0 if thinking else 1)
        chat.assert_parity(third_turn)
        chat.assert_cache_is_history(third_turn)


def test_thinking_that_was_cut_short_stays_out_of_later_turns_or_in_them_whole(tmp_path):
    """C04's neighbour: to the template, thinking that never ended is none; it stays, nothing is recomputed."""
    with tiny_chat(tmp_path, template=tiny.QWEN3) as chat:
        session = chat.store.create().id
        chat.say(session, "Capital?", "<think>\nhm, hm")
        before = chat.engine.inspect(session)["cache_pos"]
        turn = chat.service.send(session, "Well?", GREEDY)
        assert finished(turn).stats.reused_tokens == before
        assert "<think>\nhm, hm<|im_end|>" in chat.prompt_text()
        chat.assert_parity(turn)


@pytest.mark.parametrize("template", [tiny.QWEN3, EMPTY_THOUGHT])
def test_thinking_survives_restart_edit_and_regenerate(tmp_path, template):
    """C04's neighbours: whatever is done to such a chat, ids in the cache are the ids that the template rendered."""
    reply = "<think>\nso\n</think>\n\nParis.<|im_end|>"
    with tiny_chat(tmp_path, template=template) as chat:
        session = chat.store.create().id
        chat.say(session, "Capital?", reply)
        first = chat.engine.requests[-1].prompt_ids
        turn = chat.service.regenerate(session, params=GREEDY)
        assert finished(turn).stats.reused_tokens == len(first) - 1
        chat.assert_cache_is_history(turn)
        chat.engine.script.append(chat.ids(reply))
        finished(chat.service.regenerate(session))
        chat.say(session, "And Spain?", reply)
        before = chat.engine.requests[-1].prompt_ids
    with tiny_chat(tmp_path, template=template) as chat:
        turn = chat.service.regenerate(session, params=GREEDY)
        stats = finished(turn).stats
        assert chat.engine.requests[-1].prompt_ids == before
        assert stats.reused_tokens == 0 and stats.miss.cause == "restart"
        chat.assert_parity(turn)


class Clock:
    def __init__(self, *when: int) -> None:
        self.now = datetime(*when, tzinfo=ZONE)

    def __call__(self) -> datetime:
        return self.now


@pytest.mark.parametrize(
    ("template", "first_day", "third_day"),
    [(CLOCK, "It is 2031-03-04 23:59:50", "It is 2031-03-06"), (tiny.LLAMA3, "Date: 04 Mar 2031", "Date: 06 Mar 2031")],
    ids=["clock", "default-date"],
)
def test_the_date_in_the_head_stays_that_of_the_sessions_beginning(tmp_path, template, first_day, third_day):
    """C07: a clock in the prompt's head changed it every turn, or a template silently used its built-in old date."""
    clock = Clock(2031, 3, 4, 23, 59, 50)
    names = tiny.byte_level(template=template, eos_token="<|im_end|>", bos_token="<|begin_of_text|>")
    options = {"tokenizer": ChatTokenizer(names), "clock": clock}
    with tiny_chat(tmp_path, **options) as chat:
        session = chat.store.create(system_prompt="Be brief.").id
        chat.say(session, "One?", "1<|eot_id|>")
        head = chat.engine.requests[-1].prompt_ids
        assert first_day in chat.prompt_text() and "2024" not in chat.prompt_text()
        cached = chat.engine.inspect(session)["cache_pos"]
        clock.now = datetime(2031, 3, 5, 0, 0, 10, tzinfo=ZONE)
        stats = chat.say(session, "Two?", "2<|eot_id|>").stats
        assert chat.engine.requests[-1].prompt_ids[: len(head)] == head
        assert stats.reused_tokens == cached and stats.miss is None
        second = chat.engine.requests[-1].prompt_ids
    clock.now = datetime(2031, 3, 6, 12, 0, 0, tzinfo=UTC)
    with tiny_chat(tmp_path, **options) as chat:
        chat.say(session, "Three?", "3<|eot_id|>")
        assert chat.engine.requests[-1].prompt_ids[: len(second)] == second
        stats = chat.say(session, "Four?", "4<|eot_id|>").stats
        assert stats.miss is None and stats.computed_tokens < 60
        fork = chat.service.fork(session).id
        assert chat.say(fork, "Five?", "5<|eot_id|>").stats.computed_tokens < 60
        assert first_day in chat.prompt_text()
        chat.say(chat.store.create().id, "One?", "1<|eot_id|>")
        assert third_day in chat.prompt_text() and first_day not in chat.prompt_text()


def test_calls_without_a_session_get_the_real_day_and_no_time(tmp_path):
    """C07's neighbour: a client's calls of one day share their head; the template's built-in date is never used."""
    names = tiny.byte_level(template=tiny.LLAMA3, eos_token="<|im_end|>", bos_token="<|begin_of_text|>")
    with tiny_chat(tmp_path, tokenizer=ChatTokenizer(names)) as chat, TestClient(build_api(chat.service)) as api:
        before = datetime.now().astimezone()
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "ignore_eos": True}
        used = [api.post("/v1/chat/completions", json=body).json()["kvscope"]["reused_tokens"] for _ in range(2)]
        days = {day.strftime("Today Date: %d %b %Y\n") for day in (before, datetime.now().astimezone())}
        assert any(day in chat.prompt_text() for day in days) and "26 Jul 2024" not in chat.prompt_text()
        assert len(days) == 2 or used[1] >= len(chat.engine.requests[-1].prompt_ids) - 1 - BLOCK


def test_the_reason_for_a_cut_tells_other_tokens_from_other_text():
    """C04's neighbour: the same words between other role markers were told as "retokenised"."""
    tokenizer = ChatTokenizer(tiny.merged_byte_level(template=tiny.CHATML, eos_token="<|im_end|>"))
    whole = tuple(tokenizer.encode("The quick brown fox jumps over"))
    letters = tuple(i for letter in "The quick brown fox jumps over" for i in tokenizer.encode(letter))
    marked = (*tokenizer.encode("<|im_start|>"), *whole)
    assert whole != letters
    for cached, wanted, cause in (
        (letters, whole, "retokenised"),
        (whole, letters, "retokenised"),
        (marked, (*tokenizer.encode("<|start_header_id|>"), *whole), "template"),
        (marked, whole, "template"),
    ):
        sequence = Sequence(PrefixCache(BlockPool(8), BLOCK), "s")
        sequence.set_tokens(cached)
        sequence.cache_pos = len(cached)
        miss = find_miss(sequence, GenerateRequest(wanted), tokenizer)
        assert miss is not None and miss.cause == cause
        assert (miss.cached_token, miss.wanted_token) == (cached[miss.position], wanted[miss.position])
