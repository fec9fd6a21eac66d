"""One seed, one text: whatever is cached, whoever else samples, whatever happened before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from engine.protocol import TokenDelta
from engine.sampling.params import SamplingParams
from tests.support.chats import BLOCK, TinyChat, finished, tiny_chat
from ui.api.routes import build_api
from ui.turn import Turn

SEEDED = SamplingParams(temperature=0.8, top_p=1.0, seed=42, max_tokens=64, ignore_eos=True)
PROMPT = "Tell me something about the sea."


def drawn(turn: Turn) -> tuple[int, ...]:
    """Every id that was sampled, also those whose bytes formed no character in the end."""
    finished(turn)
    return tuple(i for event in turn._events if isinstance(event, TokenDelta) for i in event.token_ids)


def reply(chat: TinyChat, params: SamplingParams = SEEDED) -> tuple[int, ...]:
    return drawn(chat.service.send(chat.store.create().id, PROMPT, params))


@pytest.mark.parametrize(
    "changes",
    [{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}, {"repetition_penalty": 1.2, "frequency_penalty": 0.5}],
    ids=["plain", "filters", "penalties"],
)
def test_a_seed_gives_one_text_whatever_came_before(tmp_path, changes):
    """C35: the first run differed from its repeats once the cache was warm, or the seed had no effect at all."""
    params = replace(SEEDED, **changes)
    with tiny_chat(tmp_path) as chat:
        session = chat.store.create().id
        first = chat.service.send(session, PROMPT, params)
        wanted = drawn(first)
        assert len(wanted) == 64 and first.view().stats.seed == 42
        for _ in range(3):
            turn = chat.service.regenerate(session, params=params)
            assert drawn(turn) == wanted
            assert turn.view().stats.reused_tokens == turn.view().stats.prompt_tokens - 1
        assert reply(chat, params) == wanted
        reply(chat, replace(params, seed=7))
        assert reply(chat, params) == wanted
        assert reply(chat, replace(params, seed=43)) != wanted
    with tiny_chat(tmp_path) as chat:
        turn = chat.service.regenerate(session, params=params)
        assert drawn(turn) == wanted and turn.view().stats.reused_tokens == 0
        assert reply(chat, params) == wanted


def test_a_seed_gives_one_text_while_others_sample(tmp_path):
    """C35: sessions shared one generator, so that each took numbers from the other's."""
    with tiny_chat(tmp_path) as chat:
        alone = {seed: reply(chat, replace(SEEDED, seed=seed)) for seed in (42, 43)}
        turns = []
        for seed in (42, None, 43, 42, None):
            text = PROMPT if seed is not None else "Something else altogether, and longer: " + "x" * 90
            turns.append((seed, chat.service.send(chat.store.create().id, text, replace(SEEDED, seed=seed))))
        for seed, turn in turns:
            ids = drawn(turn)
            assert seed is None or ids == alone[seed]


def test_without_a_seed_replies_vary_and_each_tells_its_own(tmp_path):
    """C35: what was drawn without a seed can be had again with the seed that the answer shows."""
    with tiny_chat(tmp_path) as chat:
        session = chat.store.create().id
        turns = [chat.service.send(session, PROMPT, replace(SEEDED, seed=None))]
        texts = [drawn(turns[0])]
        for _ in range(2):
            turns.append(chat.service.regenerate(session, params=replace(SEEDED, seed=None)))
            texts.append(drawn(turns[-1]))
        assert len(set(texts)) == 3
        seeds = [turn.view().stats.seed for turn in turns]
        assert len(set(seeds)) == 3
        assert [record.stats["seed"] for record in chat.store.turns(session)] == seeds
        stored = [chat.store.message(turn.message_id).params for turn in turns]
        assert [(params["seed"], params["temperature"]) for params in stored] == [
            (s, SEEDED.temperature) for s in seeds
        ]
        again = chat.service.regenerate(session, params=replace(SEEDED, seed=seeds[1]))
        assert drawn(again) == texts[1]


@pytest.mark.parametrize("pool_blocks", [70, None])
def test_a_seed_outlives_eviction_and_preemption(tmp_path, pool_blocks):
    """C35's neighbour: a reply that was put off and computed again goes on with the same numbers."""
    params = replace(SEEDED, max_tokens=40)
    with tiny_chat(tmp_path, max_seq_len=192, blocks=pool_blocks) as chat:
        wanted = reply(chat, params)
        turns = [chat.service.send(chat.store.create().id, PROMPT + "!" * i, params) for i in range(4)]
        turns.append(chat.service.send(chat.store.create().id, PROMPT, params))
        assert [drawn(turn) for turn in turns][-1] == wanted
        assert chat.engine.capabilities()["block_size"] == BLOCK


def test_over_http_the_seed_is_passed_on_and_shown(tmp_path):
    """C35: the route accepted a seed and did not pass it on."""
    with tiny_chat(tmp_path) as chat, TestClient(build_api(chat.service)) as api:
        asked = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0.8, "max_tokens": 24}

        def answer(path: str = "/v1/chat/completions", **changes) -> tuple[str, int]:
            body = api.post(path, json={**asked, **changes}).json()
            choice = body["choices"][0]
            return choice.get("text") or choice["message"]["content"], body["kvscope"]["seed"]

        first = answer(seed=42)
        assert first[1] == 42 and answer(seed=42) == first and answer(seed=43) != first
        free = [answer() for _ in range(3)]
        assert len(set(free)) == 3 and answer(seed=free[0][1]) == free[0]
        session = api.post("/api/sessions", json={"params": {"seed": 42, "temperature": 0.8, "max_tokens": 24}}).json()
        body = api.post(f"/api/sessions/{session['id']}/messages", json={"content": PROMPT}).json()
        assert (body["content"], body["kvscope"]["seed"]) == first


def test_in_sixteen_bits_the_first_token_is_that_of_a_fresh_run(tmp_path):
    """C35: with a 16 bit cache only the first token is promised, and that on a warm cache too."""
    with tiny_chat(tmp_path, kv_format="bf16") as chat:
        session = chat.store.create().id
        first = drawn(chat.service.send(session, PROMPT, SEEDED))
        warm = drawn(chat.service.regenerate(session, params=SEEDED))
        assert warm[0] == first[0]
