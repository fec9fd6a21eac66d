"""A full context: errors name tokens and limit, replies end at it, and the prompt is never emptied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fastapi.testclient import TestClient

from engine.errors import ContextOverflow, InvalidRequest
from engine.kv_cache.cache import EXTENT_BYTES, KVCache, fitting_extent_bytes
from engine.kv_cache.spec import KVCacheSpec
from engine.memory.plan import kv_bytes, kv_bytes_per_token
from kernels.kv_format import KV_FORMATS
from tests.support.chats import BLOCK, GREEDY, TinyChat, finished, tiny_chat
from ui.api.routes import build_api

MIB = 2**20
OVERHEAD = 56
"""Tokens that the template adds to a session's first message."""


def works_at_once(chat: TinyChat) -> None:
    """The engine is idle, and a new short session is answered."""
    assert not chat.engine._call(lambda: chat.engine._steps().has_work)
    chat.engine.check_integrity()
    assert chat.say(chat.store.create().id, "Hi", "Hello<|im_end|>").text == "Hello"


def api_of(chat: TinyChat) -> TestClient:
    return TestClient(build_api(chat.service), raise_server_exceptions=False)


@pytest.mark.parametrize(("system", "message"), [("s" * 250, "hi"), ("", "m" * 2000), ("s" * 130, "m" * 130)])
def test_what_can_never_fit_is_refused_with_both_numbers(tmp_path, system, message):
    """C12 (i), (iii): with the context pinned full, one token at a time was discarded for ever."""
    with tiny_chat(tmp_path, context=256) as chat:
        session = chat.store.create(system_prompt=system).id
        rendered = len(system) + len(message)
        for act in (chat.service.send, chat.service.prices.preview):
            with pytest.raises(ContextOverflow) as refused:
                act(session, message)
            numbers = [int(word.strip(",;")) for word in str(refused.value).split() if word.strip(",;").isdigit()]
            assert 256 in numbers and any(rendered < number < rendered + 90 for number in numbers)
        assert chat.store.branch(session).messages == () and not chat.engine.requests
        works_at_once(chat)


@pytest.mark.parametrize("stream", [False, True])
def test_over_http_it_is_a_400_with_an_error_object(tmp_path, stream):
    """C12 (i), (iii) for clients, with and without a session, streaming or not."""
    with tiny_chat(tmp_path, context=256) as chat, api_of(chat) as api:
        session = chat.store.create(system_prompt="s" * 250).id
        user = {"role": "user", "content": "hi"}
        requests = [
            (f"/api/sessions/{session}/messages", {"content": "hi"}),
            ("/v1/chat/completions", {"messages": [user], "session_id": session}),
            ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s" * 250}, user]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "m" * 2000}], "max_tokens": 64}),
            ("/v1/completions", {"prompt": "m" * 2000}),
        ]
        for path, body in requests:
            answer = api.post(path, json={**body, "stream": stream})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "context_length_exceeded", answer.text
            assert "256" in error["message"]
        assert api.get(f"/api/sessions/{session}").json()["messages"] == []
        works_at_once(chat)


@pytest.mark.parametrize("max_tokens", [500, None, 56, 55])
def test_a_reply_ends_where_the_context_does(tmp_path, max_tokens):
    """C12 (ii): after a shift of the context, generation went past its limit."""
    with tiny_chat(tmp_path, context=256, block_size=16) as chat:
        session = chat.store.create().id
        turn = chat.service.send(session, "m" * (200 - OVERHEAD), replace(GREEDY, max_tokens=max_tokens))
        stats = finished(turn).stats
        room = 256 - stats.prompt_tokens
        assert stats.prompt_tokens == 200
        assert stats.generated_tokens == turn.max_new_tokens == min(room, max_tokens or room)
        assert stats.finish_reason == "length" and stats.cache_pos <= 255
        works_at_once(chat)
        # The chat goes on: what does not fit any more leaves, and what is left is answered.
        following = chat.service.send(session, "And now?", replace(GREEDY, max_tokens=8))
        finished(following)
        assert "And now?" in chat.prompt_text()
        chat.assert_parity(following)


QUESTIONS = ("2+2?", "Capital of France?", "Name a fruit")


@pytest.mark.parametrize("max_tokens", [512, 511, 10_000, None])
def test_a_reply_as_long_as_the_context_leaves_the_question_whole(tmp_path, max_tokens):
    """C14: the prompt's budget became 0, all messages were dropped, and every question got the same greeting."""
    params = replace(GREEDY, max_tokens=max_tokens, ignore_eos=False)
    with tiny_chat(tmp_path, context=512) as chat:
        session = chat.store.create(system_prompt="Be brief.").id
        for question in QUESTIONS:
            chat.engine.script.append(chat.ids("Some answer.<|im_end|>"))
            turn = chat.service.send(session, question, params)
            finished(turn)
            prompt = chat.engine.requests[-1].prompt_ids
            assert f"user\n{question}<|im_end|>\n<|im_start|>assistant\n" in chat.prompt_text()
            assert "Be brief." in chat.prompt_text() and turn.dropped == ()
            assert turn.max_new_tokens == 512 - len(prompt)
        assert QUESTIONS[0] in chat.prompt_text()


@pytest.mark.parametrize("max_tokens", [512, 10_000])
def test_over_http_the_effective_limit_is_told(tmp_path, max_tokens):
    """C14: what `max_tokens` really allows is in the answer, and the stateless route clamps alike."""
    with tiny_chat(tmp_path, context=512) as chat, api_of(chat) as api:
        session = api.post("/api/sessions", json={"params": {"max_tokens": max_tokens, "temperature": 0}}).json()["id"]
        chat.engine.script.append(chat.ids("4<|im_end|>"))
        body = api.post(f"/api/sessions/{session}/messages", json={"content": "2+2?"}).json()
        assert body["max_new_tokens"] == 512 - body["kvscope"]["prompt_tokens"]
        messages = [{"role": "user", "content": "m" * 420}]
        body = api.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
        )
        kvscope = body.json()["kvscope"]
        assert kvscope["prompt_tokens"] + kvscope["generated_tokens"] == 512 and kvscope["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_tokens_at_all_is_refused_everywhere(tmp_path, max_tokens):
    """C14: 0 and -1 meant "everything" or "nothing" by chance."""
    with pytest.raises(InvalidRequest, match="max_tokens"):
        replace(GREEDY, max_tokens=max_tokens)
    with tiny_chat(tmp_path) as chat, api_of(chat) as api:
        session = api.post("/api/sessions").json()["id"]
        settings = {"params": {"max_tokens": max_tokens}}
        answers = [
            api.post("/api/sessions", json=settings),
            api.patch(f"/api/sessions/{session}", json=settings),
            api.post(f"/api/sessions/{session}/messages", json={"content": "hi", **settings}),
            api.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **settings["params"]}
            ),
            api.post("/v1/completions", json={"prompt": "x", **settings["params"]}),
        ]
        for answer in answers:
            assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]
        assert api.get(f"/api/sessions/{session}").json()["messages"] == [] and not chat.engine.requests


# -- what a context costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", list(KV_FORMATS))
@pytest.mark.parametrize("tokens", [100, 1000, 4096, 10_000, 32768, 131072])
def test_the_memory_estimate_is_what_is_allocated(kv_format, tokens):
    """C22: the estimate for a long context was far from the real use. 16 layers, 8 KV heads, head size 64."""
    spec = KVCacheSpec(16, 8, 64, block_size=16, format=KV_FORMATS[kv_format])
    assert spec.bytes_per_token == kv_bytes_per_token(16, 8, 64, kv_format)
    cache = KVCache(spec, torch.device("meta"), fitting_extent_bytes(spec, tokens))
    cache.grow(-(-tokens // 16) + 1)
    extents = (*cache.extents, *cache.scale_extents)
    assert cache.reserved_bytes == sum(extent.nbytes for extent in extents) >= tokens * spec.bytes_per_token
    assert kv_bytes(tokens, spec.bytes_per_token, 16) == pytest.approx(cache.reserved_bytes, rel=0.05)
    assert max(extent.nbytes for extent in cache.extents) < 1.6 * EXTENT_BYTES


@pytest.mark.parametrize("context", [128, 512])
def test_a_full_context_takes_what_was_planned_and_never_more_than_the_budget(tmp_path, context):
    """C22: what the panel shows as reserved is what the plan said, also with a budget for exactly one context."""
    per_token = kv_bytes_per_token(2, 2, 16, "fp32")
    planned = kv_bytes(context, per_token, BLOCK)
    for budget in (64 * MIB, planned):
        with tiny_chat(tmp_path, context=context, kv_budget=budget) as chat:
            assert chat.engine.capabilities()["bytes_per_token"] == per_token
            session = chat.store.create().id
            turn = chat.service.send(session, "m" * (context - OVERHEAD - 8), replace(GREEDY, max_tokens=None))
            finished(turn)
            memory = chat.engine.memory()
            assert memory["kv_used"] == pytest.approx(planned, rel=0.05)
            assert memory["kv_used"] <= memory["kv_reserved"] <= budget
            assert memory["kv_reserved"] == pytest.approx(planned, rel=0.05)
            chat.assert_parity(turn)


def test_a_pool_of_several_extents_ends_at_its_budget(tmp_path):
    """C22: the last extent went past the budget by up to its whole size."""
    per_token = kv_bytes_per_token(2, 2, 16, "fp32")
    budget = 150 * BLOCK * per_token
    with tiny_chat(tmp_path, context=128, kv_budget=budget) as chat:
        turns = []
        for index in range(6):
            text = chr(ord("a") + index) * (120 - OVERHEAD)
            turns.append(chat.service.send(chat.store.create().id, text, replace(GREEDY, max_tokens=8)))
        for turn, request in zip(turns, list(chat.engine.requests), strict=True):
            finished(turn)
            chat.assert_parity(turn, request)
        cache = chat.engine._need_parts().cache
        assert len(cache.extents) > 2 and cache.extents[-1].shape[0] < cache.extents[0].shape[0]
        assert cache.reserved_bytes == sum(extent.nbytes for extent in cache.extents) == budget
