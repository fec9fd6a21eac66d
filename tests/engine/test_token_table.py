"""The token table: a replay gives the numbers of the live run, and each position says where its K and V came from."""

from __future__ import annotations

import uuid
from dataclasses import replace
from itertools import chain

import pytest
import torch

from engine.debugging import tokens
from engine.debugging.protocol import FaultRequest, TokenQuery
from engine.debugging.scratch import logits_behind
from engine.kv_cache.origin import Origin
from engine.protocol import GenerateRequest, TokenDelta
from engine.replay import Replay
from engine.sampling.params import SamplingParams
from tests.support.chats import GREEDY, tiny_chat
from tests.support.engines import run, tiny_engine

SAMPLED = SamplingParams(temperature=0.8, seed=4, max_tokens=40, ignore_eos=True)


def said(engine, prompt: tuple[int, ...], session_id: str | None = None, params: SamplingParams = SAMPLED):
    """`(ids as sampled, their measures)`."""
    deltas = [e for e in run(engine, GenerateRequest(prompt, params, session_id)) if isinstance(e, TokenDelta)]
    return tuple(i for e in deltas for i in e.token_ids), [m for e in deltas for m in e.measures]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "bamba", "mamba2"])
def test_a_replay_gives_what_was_measured_live(kind):
    engine = tiny_engine(kind=kind)
    try:
        session_id, prompt = str(uuid.uuid4()), tuple(range(40, 70))
        ids, measures = said(engine, prompt, session_id)
        rows = engine.token_table(TokenQuery(session_id, prompt, ids, 5, 30))
    finally:
        engine.close()
    assert len(rows) == 30
    for row, token_id, live in zip(rows, ids[5:], measures[5:], strict=False):
        assert row["logprob"] == pytest.approx(live.logprob, abs=1e-3)
        assert row["entropy"] == pytest.approx(live.entropy, abs=1e-3)
        assert row["top1"] == pytest.approx(live.top1, abs=1e-3)
        assert abs(row["rank"] - live.rank) <= 1  # two that are equal but for rounding
        assert len(row["top"]) == 5 and row["top"][0]["logprob"] == pytest.approx(max(t["logprob"] for t in row["top"]))
        if live.rank < 4:
            assert token_id in [top["token_id"] for top in row["top"]]


def test_each_position_says_where_it_came_from():
    engine = tiny_engine()
    try:
        session_id, prompt = str(uuid.uuid4()), tuple(range(40, 70))
        ids, _ = said(engine, prompt, session_id)
        rows = engine.token_places(TokenQuery(session_id, prompt, ids, 0, 40))
        report = engine.inspect(session_id)
        origins = [row["origin"] for row in rows]
        cached = report["cache_pos"] - len(prompt)
        assert cached >= 30 and origins == ["decode"] * cached + [None] * (40 - cached)
        for position, row in enumerate(rows[:cached], start=len(prompt)):
            assert report["block_table"][position // 4] == row["block"] and position % 4 == row["slot"]
        # Another session takes full blocks over; the reply becomes part of a prompt there.
        other, longer = str(uuid.uuid4()), (*prompt, *ids[:20], 7, 8, 9)
        said(engine, longer, other, replace(SAMPLED, max_tokens=2))
        sequence = engine._steps().scheduler.find(other)
        full = (len(prompt) + 20) // 4 * 4
        assert list(sequence.origins[:full]) == [Origin.SHARED] * full
        assert set(sequence.origins[full : len(longer)]) == {Origin.PREFILL}
        assert len(sequence.origins) == sequence.cache_pos
    finally:
        engine.close()


def test_what_comes_back_from_disk_says_so(tmp_path):
    prompt = tuple(range(40, 70))
    session_id = str(uuid.uuid4())
    engine = tiny_engine(data_dir=tmp_path, snapshot_limit=2**30)
    ids, _ = said(engine, prompt, session_id)
    engine.close()
    engine = tiny_engine(data_dir=tmp_path, snapshot_limit=2**30)
    try:
        engine.restore(session_id)
        rows = engine.token_places(TokenQuery(session_id, prompt, ids, 0, 20))
        assert {row["origin"] for row in rows} == {"snapshot"}
    finally:
        engine.close()


def test_what_is_not_cached_has_no_place():
    engine = tiny_engine()
    try:
        query = TokenQuery(str(uuid.uuid4()), (1, 2, 3), (4, 5, 6), 0, 10)
        assert engine.token_places(query) == [{"block": None, "slot": None, "origin": None}] * 3
        assert (
            len(engine.token_table(replace(query, start=2))) == 1 and engine.token_table(replace(query, start=3)) == []
        )
    finally:
        engine.close()


def test_origins_keep_up_with_every_act(tmp_path):
    """Cut, regenerated, forked, undone: there is one origin per cached position throughout."""
    with tiny_chat(tmp_path) as chat:
        session = chat.store.create()
        for text in ("Hello", "How are you?", "Go on"):
            chat.send(session.id, text)
        turn = chat.service.regenerate(session.id, params=replace(GREEDY, temperature=0.9, seed=1))
        turn.wait(2**62, timeout_s=60)
        twin = chat.service.fork(session.id)
        chat.send(twin.id, "And here?")
        chat.service.undo(session.id)
        chat.send(session.id, "Another way")
        for sequence in chat.engine._steps().scheduler.sequences():
            assert len(sequence.origins) == sequence.cache_pos > 0


def test_measures_survive_a_restart(tmp_path):
    with tiny_chat(tmp_path) as chat:
        session = chat.store.create()
        turn = chat.service.send(session.id, "Hello", GREEDY)
        turn.wait(2**62, timeout_s=60)
        message = chat.store.message(turn.message_id)
        live = turn.measures(message.token_ids)
        assert live
    with tiny_chat(tmp_path) as chat:
        stored = chat.store.measures(message.id)
        assert stored.kv_format == "fp32" and len(stored.measures) == len(live)
        for kept, measured in zip(stored.measures, live, strict=True):
            assert kept[0] == pytest.approx(measured.logprob, abs=1e-5) and kept[1] == measured.rank
        chat.store.delete(session.id)
        with chat.store._database.read() as db:
            assert db.execute("SELECT count(*) FROM token_measures").fetchone()[0] == 0


NO_TIME = SamplingParams(temperature=0.8, seed=4, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("options", [{}, {"kind": "qwen3"}, {"kv_format": "int8"}, {"kind": "qwen2", "window": 64}])
def test_behind_the_cache_a_token_costs_no_replay_and_gives_what_one_gives(monkeypatch, options):
    """Guards against running a long chat again for each click: 51 s at 4,450 tokens."""
    engine = tiny_engine(**options)
    try:
        session_id, prompt = str(uuid.uuid4()), tuple(range(40, 98))
        ids, _ = said(engine, prompt, session_id, NO_TIME)
        before = engine.inspect(session_id)
        queries = [TokenQuery(session_id, prompt, ids, *part) for part in ((0, 16), (5, 3), (30, 30), (59, 1))]
        with monkeypatch.context() as patch:
            patch.setattr(tokens, "follow", lambda *_: pytest.fail("the whole reply was run again"))
            quick = [engine.token_table(query) for query in queries]
        with monkeypatch.context() as patch:
            patch.setattr(tokens, "_behind_cache", lambda *_: None)
            whole = [engine.token_table(query) for query in queries]
        assert engine.inspect(session_id) == before
        engine.check_integrity()
    finally:
        engine.close()
    assert [len(rows) for rows in quick] == [16, 3, 30, 1]
    for row, other in zip(chain(*quick), chain(*whole), strict=True):
        assert row["logprob"] == pytest.approx(other["logprob"], abs=2e-4)
        assert row["entropy"] == pytest.approx(other["entropy"], abs=2e-4)
        assert [top["token_id"] for top in row["top"]] == [top["token_id"] for top in other["top"]]
        assert row["rank"] == other["rank"]


def test_from_the_first_token_on_it_is_equal_bit_for_bit(monkeypatch):
    """The prompt's rows are those that the replay makes, and the same steps are run behind them."""
    engine = tiny_engine()
    try:
        session_id, prompt = str(uuid.uuid4()), tuple(range(40, 60))
        ids, _ = said(engine, prompt, session_id)
        lane = engine._steps(session_id)
        sequence = lane.scheduler.find(session_id)
        history = (*prompt, *ids)

        def behind(start: int, end: int) -> torch.Tensor:
            found = logits_behind(lane, lane.parts, sequence, history[start:end], start)
            assert found is not None
            return found

        replay = Replay(lane.parts.model, lane.parts.cache.spec, len(history))
        whole = engine._call(lambda: torch.cat([replay.extend(prompt, 1), replay.extend(ids[:1], 1)]))
        assert torch.equal(engine._call(lambda: behind(len(prompt), len(prompt) + 1)), whole[1:])
    finally:
        engine.close()


@pytest.mark.parametrize("why", ["full", "damaged", "edited", "unknown"])
def test_where_the_cache_does_not_serve_the_reply_is_run_again(why):
    engine = tiny_engine(fault_injection=True)
    try:
        session_id, prompt = str(uuid.uuid4()), tuple(range(40, 58))
        ids, _ = said(engine, prompt, session_id)
        query = TokenQuery(session_id, prompt, ids, 20, 5)
        if why == "unknown":
            query = replace(query, session_id=str(uuid.uuid4()))
        elif why == "edited":
            said(engine, (*prompt[:10], 7, 7, 7), session_id, replace(SAMPLED, max_tokens=2))
        elif why == "damaged":
            engine.inject(FaultRequest(session_id, "nan", 0, 5, 1))
        pool = engine._steps(session_id).prefix_cache.pool
        if why == "full":
            engine._call(lambda: setattr(pool, "limit", pool.high_water))
            assert not pool.free_count
        assert len(engine.token_table(query)) == 5
    finally:
        engine.close()
