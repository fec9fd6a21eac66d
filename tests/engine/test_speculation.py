"""Drafts change nothing but the time: each reply, number and cache is that of a run without them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequest
from engine.protocol import ChatMessage, Event, Failed, Finished, GenerateRequest, TokenDelta
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingState
from engine.sampling.step import StepOutput, sample_on_host
from engine.turns import speculation
from engine.weights.catalog import ModelSource
from tests.support.engines import RecordingEngine, run, tiny_engine, tiny_parts

TEXT = "the cat sat on the mat. the cat sat on the "
ROUNDING = 1e-4
"""Of float32 products with one row and with several. The compiled kernels have none: see the default model."""


@pytest.fixture(scope="module", params=[("llama", 3), ("llama", 7), ("qwen3-window", 7)], ids=str)
def pair(request) -> Iterator[tuple[RecordingEngine, RecordingEngine]]:
    """An engine without drafts and one that runs so many whenever it has a guess; a block holds four tokens."""
    kind, drafts = request.param
    engines = (tiny_engine(kind=kind, speculation="off"), tiny_engine(kind=kind, speculation="on"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "FIXED_DRAFTS", drafts)
        yield engines
    for engine in engines:
        engine.check_integrity()
        engine.close()


def prompt(engine: RecordingEngine, text: str = TEXT) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode(text))


def deltas(events: list[Event]) -> list[TokenDelta]:
    return [event for event in events if isinstance(event, TokenDelta)]


def same(events: list[Event], drafted: list[Event], tolerance: float = ROUNDING) -> Finished:
    """The events agree in all but times; the end of the ones with drafts."""
    for one, other in zip(deltas(events), deltas(drafted), strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert replace(one.stats, **timeless(one)) == replace(other.stats, **timeless(other))
        assert len(one.measures) == len(other.measures) and len(one.logprobs) == len(other.logprobs)
        for mine, theirs in zip(one.measures, other.measures, strict=True):
            assert mine.rank == theirs.rank
            for name in ("logprob", "entropy", "top1"):
                assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=tolerance)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=tolerance)
            assert [entry[:2] for entry in mine.top] == [entry[:2] for entry in theirs.top]
    end, with_drafts = events[-1], drafted[-1]
    assert isinstance(end, Finished) and isinstance(with_drafts, Finished)
    assert (end.token_ids, end.text) == (with_drafts.token_ids, with_drafts.text)
    assert replace(end.stats, **timeless(end)) == replace(with_drafts.stats, **timeless(with_drafts))
    assert end.stats.drafted_tokens == 0 and with_drafts.stats.accepted_tokens <= with_drafts.stats.drafted_tokens
    return with_drafts


def timeless(event: TokenDelta | Finished) -> dict[str, Any]:
    """What may differ, or must, as 0."""
    names = ("ttft_ms", "prefill_ms", "decode_tokens_per_s", "drafted_tokens", "accepted_tokens", "seed")
    return dict.fromkeys(names, 0)


def both(pair, *, text: str = TEXT, session: str | None = None, **params) -> Finished:
    request = GenerateRequest(prompt(pair[0], text), SamplingParams(**{"ignore_eos": True, **params}), session)
    return same(*(run(engine, request) for engine in pair))


SETTINGS = [
    {},
    {"repetition_penalty": 1.05, "frequency_penalty": 0.02},
    {"presence_penalty": -0.5},
    {"logit_bias": {7: 3.0}},
    {"top_logprobs": 3},
    {"temperature": 0.3, "seed": 2},
    {"temperature": 0.3, "seed": 3, "top_k": 5, "min_p": 0.05, "top_logprobs": 1},
    {"temperature": 0.2, "seed": 4, "presence_penalty": -0.2, "repetition_penalty": 0.97},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_replies_are_those_of_steps_of_one_token(pair, settings):
    """Each row of a step takes the penalties, the random number and the filters of its own place in the reply."""
    end = both(pair, **{"temperature": 0, "max_tokens": 90, **settings})
    assert end.stats.generated_tokens == 90 and end.stats.drafted_tokens > 0


def test_drafts_come_true_where_a_text_repeats_itself(pair):
    texts = (TEXT, "ab" * 20, "one two " * 9)
    ends = [both(pair, text=text, temperature=0, max_tokens=200).stats for text in texts]
    counts = [(stats.drafted_tokens, stats.accepted_tokens) for stats in ends]
    assert sum(accepted for _, accepted in counts) > max(30, sum(drafted for drafted, _ in counts) / 3)


def test_a_reply_ends_at_any_token(pair):
    """The limit falls on the first, a middle and the last token of a step."""
    accepted = [both(pair, temperature=0, max_tokens=count).stats for count in range(30, 44)]
    assert all(stats.finish_reason == "length" for stats in accepted)
    assert [stats.generated_tokens for stats in accepted] == list(range(30, 44))


def test_a_stop_string_within_drafts_that_came_true(pair):
    """What was run behind it is neither in the reply nor in the cache."""
    text = both(pair, temperature=0, max_tokens=90).text
    found = 0
    for start in range(20, 60, 3):
        stop = text[start : start + 4]
        if "\ufffd" in stop or len(stop) < 4:
            continue
        end = both(pair, temperature=0, max_tokens=90, stop=(stop,), session=f"stop {start}")
        assert end.stats.finish_reason == "stop" and stop not in end.text
        found += end.stats.accepted_tokens > 0
        compare_caches(pair, f"stop {start}")
    assert found


def test_an_end_token_within_a_step(pair, monkeypatch):
    """It ends the reply, also where it was drawn from a row with drafts behind it."""
    reply = both(pair, temperature=0, max_tokens=90).token_ids
    ends = set(reply[40:])
    assert ends
    for number, token_id in enumerate(ends):
        for engine in pair:
            monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset({token_id}))
        session = f"end {number}"
        end = both(pair, temperature=0, max_tokens=90, ignore_eos=False, session=session)
        assert end.stats.finish_reason == "stop" and token_id not in end.token_ids
        compare_caches(pair, session)


def compare_caches(pair, session: str) -> None:
    """Positions, owners, blocks, origins and invariants, and the values that the kernels read."""
    reports = [engine.inspect(session) for engine in pair]
    for report in reports:
        assert all(report["invariants"].values()) and report["violation"] is None
    for name in ("cache_pos", "token_ids", "bytes_used"):
        assert reports[0][name] == reports[1][name], name
    for name in ("start", "count", "ref_count", "tier", "format"):
        cells = [[block[name] for block in report["blocks"]] for report in reports]
        assert cells[0] == cells[1], name
    origins = [engine._steps().scheduler.find(session).origins for engine in pair]
    assert origins[0] == origins[1]
    tables = [[len(table) for table in engine._steps().scheduler.find(session).block_tables] for engine in pair]
    assert tables[0] == tables[1]


def test_a_chat_goes_on_from_a_cache_that_drafts_were_in(pair):
    """Turn by turn the same: what was not accepted is in nobody's cache, and no block is kept for it."""
    history = prompt(pair[0])
    for turn in range(4):
        params = SamplingParams(temperature=0, max_tokens=37 + turn, ignore_eos=True)
        request = GenerateRequest(history, params, "chat")
        end = same(*(run(engine, request) for engine in pair))
        assert end.stats.reused_tokens > 0 or turn == 0
        compare_caches(pair, "chat")
        history += (*end.token_ids, *prompt(pair[0], " and the cat "))
    reports = [engine.audit("chat") for engine in pair]
    assert [report["verdict"] for report in reports] == ["clean", "clean"]


def test_several_replies_at_once_with_a_prompt_between_them(pair):
    """Prompts that come while others are in the midst of drafts, and replies with and without drafts side by side."""
    texts = [TEXT, "one two one two one two ", "x" * 40, TEXT * 4, "Paris is the capital."]
    wanted = [both(pair, text=text, temperature=0, max_tokens=60).token_ids for text in texts]
    found: list[tuple[int, ...]] = [()] * len(texts)

    def reply(index: int) -> None:
        mode = ("on", "off", "auto", None, None)[index]
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, speculation=mode)
        events = run(pair[1], GenerateRequest(prompt(pair[0], texts[index]), params))
        assert isinstance(events[-1], Finished)
        found[index] = events[-1].token_ids

    threads = [threading.Thread(target=reply, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted


def test_the_context_ends_where_it_did():
    engines = [tiny_engine(speculation=mode, max_seq_len=64, context=64) for mode in ("off", "on")]
    end = both(engines, temperature=0, session="full")
    assert end.stats.finish_reason == "length" and end.stats.drafted_tokens > 0
    assert end.stats.prompt_tokens + end.stats.generated_tokens == 64
    compare_caches(engines, "full")
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("options", [{"kv_format": "int8"}, {"window": 24}, {"window": 24, "sinks": 5}], ids=str)
def test_other_stores_take_drafts_too(options):
    """Codes of a draft that did not come true are written over; a window moves by what is kept."""
    engines = [tiny_engine(speculation=mode, **options) for mode in ("off", "on")]
    tolerance = 0.02 if "kv_format" in options else ROUNDING
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    request = GenerateRequest(prompt(engines[0]), params, "one")
    end = same(*(run(engine, request) for engine in engines), tolerance)
    assert end.stats.drafted_tokens > 0
    compare_caches(engines, "one")
    for engine in engines:
        engine.check_integrity()
        engine.close()


def test_no_block_is_taken_from_anybody_for_a_draft():
    """In a pool with just the blocks that the reply itself needs there is room for some drafts only."""
    wanted = tiny_engine(speculation="off")
    request = GenerateRequest(prompt(wanted), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    blocks = -(-(len(request.prompt_ids) + 59) // 4) + 1
    engines = [wanted, tiny_engine(speculation="on", blocks=blocks)]
    end = same(*(run(engine, request) for engine in engines))
    assert end.stats.drafted_tokens > 0
    for engine in engines:
        engine.check_integrity()
        engine.close()


# -- where there are none ---------------------------------------------------------------------------------------------


def test_beams_and_given_ids_have_no_drafts():
    engine = tiny_engine(speculation="on")
    ids = prompt(engine)
    given = run(engine, GenerateRequest(ids, SamplingParams(), forced_ids=ids[:30]))[-1]
    beams = run(engine, GenerateRequest(ids, SamplingParams(max_tokens=20), beams=BeamParams(2)))[-1]
    for end in (given, beams):
        assert isinstance(end, Finished) and end.stats.drafted_tokens == 0
    engine.close()


def test_a_recurrent_state_cannot_be_taken_back():
    """Its replies have no drafts, and who insists on them is told at the start."""
    engine = tiny_engine(kind="bamba", speculation="auto")
    request = GenerateRequest(prompt(engine), SamplingParams(temperature=0, max_tokens=40, speculation="on"))
    end = run(engine, request)[-1]
    assert isinstance(end, Finished) and end.stats.drafted_tokens == 0
    assert engine.capabilities()["speculation"] == "off"
    engine.close()
    config, load = tiny_parts(kind="bamba", speculation="on")
    with pytest.raises(ConfigError, match="can't be taken back"):
        load(config)


def test_a_request_chooses_for_itself():
    engine = tiny_engine(speculation="off")
    request = GenerateRequest(prompt(engine), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    counts = {}
    for mode in (None, "off", "on"):
        end = run(engine, replace(request, params=replace(request.params, speculation=mode)))[-1]
        assert isinstance(end, Finished)
        counts[mode] = end.stats.drafted_tokens
    assert counts[None] == counts["off"] == 0 < counts["on"]
    tokens = engine.metrics()["tokens"]
    assert tokens["drafted"] == counts["on"] and 0 < tokens["accepted"] <= tokens["drafted"]
    with pytest.raises(InvalidRequest, match="speculation must be one of auto, on, off"):
        SamplingParams(speculation="ngram")
    engine.close()


# -- rows that did not come true --------------------------------------------------------------------------------------


def test_a_row_counts_only_if_the_one_before_drew_its_draft():
    states = [SamplingState(SamplingParams(temperature=0), (), 4) for _ in range(3)]
    logits = torch.eye(4)[[1, 2, 3, 0, 2, 2]]
    requests = [states[0]] * 3 + [states[1]] * 2 + [states[2]]
    output = StepOutput(torch.zeros(6, 1), logits, (1,) * 6, tuple(range(6)))
    tokens = sample_on_host(output, requests, [None] * 6, [None, 1, 0, None, 3, None])
    found = tokens.by_item([3, 2, 1])
    assert [[token_id for token_id, _, _ in drawn] for _, drawn in found] == [[1, 2], [0], [2]]
    assert [state.reply_ids for state in states] == [[1, 2], [0], [2]]


def test_values_that_are_not_finite_end_the_drafts_before_them():
    """The token that they belong to may never come; if it does, its own step fails."""
    state = SamplingState(SamplingParams(temperature=0), (), 4)
    logits = torch.eye(4)[[1, 2, 3, 0]]
    logits[1, 0] = torch.nan
    output = StepOutput(torch.zeros(4, 1), logits, (1,) * 4, (0, 1, 2, 3))
    found = sample_on_host(output, [state] * 4, [None] * 4, [None, 1, 2, 3]).by_item([4])
    assert found[0][0] and [token_id for token_id, _, _ in found[0][1]] == [1]
    logits[0, 0] = torch.inf
    assert not sample_on_host(output, [state] * 4, [None] * 4, [None, 1, 2, 3]).by_item([4])[0][0]


def test_a_draft_that_is_not_finite_ends_no_reply(monkeypatch):
    """Guard: one flag for all rows of a step would have ended replies because of tokens that never came."""
    engines = [tiny_engine(speculation=mode) for mode in ("off", "on")]
    head, spoilt = engines[1]._steps().parts.model.head, []

    def spoil(hidden):
        logits = head(hidden)
        if len(logits) > 1:
            spoilt.append(len(logits))
            logits[1:] = torch.nan
        return logits

    request = GenerateRequest(prompt(engines[0]), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    events = run(engines[0], request)
    monkeypatch.setattr(engines[1]._steps().parts.model, "head", spoil)
    end = same(events, run(engines[1], request))
    assert spoilt and end.stats.drafted_tokens > 0 and end.stats.accepted_tokens == 0
    for engine in engines:
        engine.close()


def test_a_step_that_fails_leaves_no_draft_behind(monkeypatch):
    engine = tiny_engine(speculation="on")
    head = engine._steps().parts.model.head
    monkeypatch.setattr(
        engine._steps().parts.model, "head", lambda hidden: head(hidden) * (torch.nan if len(hidden) > 1 else 1.0)
    )
    request = GenerateRequest(
        prompt(engine), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), session_id="failed"
    )
    end = run(engine, request)[-1]
    assert isinstance(end, Failed) and end.error.code == "non_finite_values"
    report = engine.inspect("failed")
    assert report["cache_pos"] < len(request.prompt_ids)
    engine.check_integrity()
    engine.close()


# -- the default model ------------------------------------------------------------------------------------------------

PASSAGE = (
    "The lighthouse stands at the northern end of the island. It was built by forty men, who carried every stone up "
    "the cliff by hand. For more than a century its lamp was lit each evening by a keeper."
)


@pytest.fixture(scope="module")
def default_engine(default_model: ModelSource) -> Iterator[RecordingEngine]:
    if default_model.kind != "gguf":
        pytest.skip("the default model came from the hub")
    path = default_model.path
    engine = RecordingEngine(EngineConfig(path.parent, str(path), device="cpu", snapshot_limit=0, speculation="on"))
    engine.requests, engine.script = [], []
    engine.start()
    engine.wait_ready(120)
    yield engine
    engine.check_integrity()
    engine.close()


@pytest.mark.model
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.7, "seed": 5}], ids=str)
def test_the_compiled_kernels_give_the_same_bits(default_engine, params):
    """A token's result does not depend on its neighbours in the batch: logits with drafts are those without."""
    question = f"Repeat the following text word for word:\n\n{PASSAGE}"
    ids = default_engine.tokenizer.render([ChatMessage("user", question)], datetime(2026, 1, 1, tzinfo=UTC)).token_ids
    settings = SamplingParams(max_tokens=48, **params)
    run(default_engine, GenerateRequest(ids, SamplingParams(max_tokens=1)))  # both find the same prompt in the cache
    off, on = (run(default_engine, GenerateRequest(ids, replace(settings, speculation=mode))) for mode in ("off", "on"))
    end = same(off, on, tolerance=0.0)
    assert end.stats.accepted_tokens > 10
    assert all(event.measures for event in deltas(on))
