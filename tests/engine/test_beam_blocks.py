"""The blocks of a beam search: the prompt's once, a suffix per beam, nothing left behind, whatever else runs."""

from __future__ import annotations

import random
import time
import uuid
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import InvalidRequest, NonFiniteValues
from engine.kv_cache.spec import KVCacheSpec
from engine.loader import EngineParts, assemble
from engine.protocol import Failed, Finished, GenerateRequest, TokenDelta
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams
from engine.scheduler import SchedulerLimits
from engine.step_loop import StepLoop
from engine.turns.beam_turn import BeamTurn
from engine.turns.turn import QueueStream
from kernels.kv_format import KV_FORMATS
from tests.support.engines import loaded_model, run, tiny_engine
from tests.support.tiny_tokenizer import chat_tokenizer

PROMPT = tuple(b"The cat sat on the mat and looked at the moon.")
OTHER = tuple(b"A quite different beginning of a text")
SIZE = 4
FULL = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def make_loop(blocks: int, max_sequences: int = 16) -> StepLoop:
    tokenizer = chat_tokenizer()
    model = loaded_model(vocab_size=tokenizer.vocab_size)
    sizes = model.config
    spec = KVCacheSpec(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, SIZE, KV_FORMATS["fp32"])
    config = EngineConfig(Path("unused"), kv_format="fp32", kv_budget=blocks * spec.block_bytes, block_size=SIZE)
    parts = assemble(config, model, tokenizer, "tiny")
    limits = SchedulerLimits(max_sequences, max_batch_tokens=24, mixed_batch_tokens=12)
    return StepLoop(EngineParts(**{**{name: getattr(parts, name) for name in parts.__slots__}, "limits": limits}))


def begin(
    loop: StepLoop, prompt: tuple[int, ...], num_beams: int, session: str | None = None, penalty: float = 1.0, **params
) -> QueueStream:
    settings = SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **params})
    request = GenerateRequest(prompt, settings, session, beams=BeamParams(num_beams, penalty))
    stream = QueueStream(request.request_id, lambda: loop.turns.cancel(request.request_id))
    loop.turns.start(request, stream, lambda: None, time.perf_counter())
    return stream


def result(stream: QueueStream) -> tuple[int, ...]:
    events = list(stream)
    assert isinstance(events[-1], Finished), events[-1]
    return tuple(i for event in events if isinstance(event, TokenDelta) for i in event.token_ids)


@torch.inference_mode()
def run_out(loop: StepLoop, after=lambda: None) -> None:
    while loop.has_work:
        loop.step()
        loop.check_integrity()
        assert sum(sequence.places for sequence in loop.scheduler.running) <= loop.scheduler.limits.max_sequences
        after()
    loop.step()


def beam_turn(loop: StepLoop) -> BeamTurn | None:
    return next((turn for turn in loop.turns.active() if isinstance(turn, BeamTurn)), None)


@pytest.mark.parametrize("eos", [(), (101, 104, 199)])
@pytest.mark.parametrize("num_beams", [2, 4, 8])
def test_memory_is_the_prompt_once_and_each_suffix(num_beams, eos, monkeypatch):
    loop, session = make_loop(200), str(uuid.uuid4())
    monkeypatch.setattr(loop.parts.tokenizer, "eos_ids", frozenset(eos))
    stream = begin(loop, PROMPT, num_beams, session, ignore_eos=False, max_tokens=40)
    pool, prefix = loop.prefix_cache.pool, len(PROMPT) // SIZE
    seen: list[int] = []

    def look() -> None:
        turn = beam_turn(loop)
        if turn is None or len(turn.beams) == 1:
            return
        tables = [sequence.block_table for sequence in turn.sequences()]
        assert all(table[:prefix] == tables[0][:prefix] for table in tables)
        suffixes = {block for table in tables for block in table[prefix:]}
        assert pool.used_count == prefix + len(suffixes)
        report = loop.turns.beams(session)
        assert [line["block_table"] for line in report] == [beam.block_table for beam in turn.beams]
        assert all(line["shared_blocks"] >= prefix for line in report)
        assert all(line["shared_blocks"] + line["own_blocks"] == len(line["block_table"]) for line in report)
        assert [line["score"] for line in report] == sorted((line["score"] for line in report), reverse=True)
        longest = max(len(beam.token_ids) for beam in turn.beams) - len(PROMPT)
        assert len({block for beam in turn.beams for block in beam.block_table}) <= prefix + num_beams * (
            longest // SIZE + 2
        )
        seen.append(len(turn.beams))

    run_out(loop, look)
    assert max(seen) == num_beams
    finished = list(stream)[-1]
    assert isinstance(finished, Finished)
    history = (*PROMPT, *finished.token_ids)
    winner = loop.scheduler.find(session)
    assert winner is not None and tuple(winner.token_ids) == history[: winner.cache_pos + 1]
    assert pool.used_count == len(winner.block_table)
    assert loop.turns.beams(session)


def test_a_reply_that_better_ones_displace_gives_its_blocks_back(monkeypatch):
    loop = make_loop(200)
    monkeypatch.setattr(loop.parts.tokenizer, "eos_ids", frozenset(range(0, 271, 20)))
    stream = begin(loop, PROMPT, 2, str(uuid.uuid4()), penalty=4.0, ignore_eos=False, max_tokens=40)
    ended: set[tuple[int, ...]] = set()

    def look() -> None:
        turn = beam_turn(loop)
        ended.update(turn._ended if turn is not None else ())

    run_out(loop, look)
    assert len(ended) > 2
    assert isinstance(list(stream)[-1], Finished)


@pytest.mark.parametrize("seed", range(12))
def test_little_memory_and_other_turns_change_no_reply(seed):
    """Beams are preempted, come back and go on; each reply is what it is with room for all."""
    rng = random.Random(seed)
    counts = [rng.choice((2, 3, 4)), 1, rng.choice((1, 2))]
    prompts = [PROMPT, OTHER, PROMPT[:30]]
    expected = []
    for prompt, count in zip(prompts, counts, strict=True):
        roomy = make_loop(200)
        stream = begin(roomy, prompt, count)
        run_out(roomy)
        expected.append(result(stream))
    tight = make_loop(rng.randint(32, 45), max_sequences=rng.choice((4, 5, 16)))
    streams = []
    for prompt, count in zip(prompts, counts, strict=True):
        streams.append(begin(tight, prompt, count, str(uuid.uuid4()) if rng.random() < 0.5 else None))
        with torch.inference_mode():
            for _ in range(rng.randint(0, 8)):
                tight.step()
    run_out(tight)
    assert [result(stream) for stream in streams] == expected


def test_the_tight_pool_of_the_test_above_does_preempt(monkeypatch):
    loop = make_loop(32)
    preempted: list[object] = []
    plain = loop.scheduler._preempt
    monkeypatch.setattr(loop.scheduler, "_preempt", lambda seq: (preempted.append(seq), plain(seq)))
    streams = [begin(loop, OTHER, 1), begin(loop, PROMPT, 4)]
    run_out(loop)
    assert preempted
    assert all(len(result(stream)) == 20 for stream in streams)


def test_beams_that_do_not_fit_at_all_end_in_one_sentence():
    loop, session = make_loop(20), str(uuid.uuid4())
    stream = begin(loop, PROMPT, 8, session, max_tokens=60)
    run_out(loop)
    last = list(stream)[-1]
    assert isinstance(last, Failed) and "too small" in str(last.error)
    sequence = loop.scheduler.find(session)
    assert sequence is not None and sequence.cache_pos <= len(PROMPT)


@torch.inference_mode()
def test_cancelling_keeps_the_best_reply_so_far_and_gives_the_other_beams_back():
    loop, session = make_loop(200), str(uuid.uuid4())
    stream = begin(loop, PROMPT, 4, session)
    for _ in range(9):
        loop.step()
    turn = beam_turn(loop)
    assert turn is not None
    best = turn.search.live[0].token_ids
    stream.cancel()
    loop.check_integrity()
    events = list(stream)
    assert events[-1].stats.finish_reason == "cancelled"
    assert tuple(i for event in events if isinstance(event, TokenDelta) for i in event.token_ids) == best
    sequence = loop.scheduler.find(session)
    assert loop.prefix_cache.pool.used_count == len(sequence.block_table)
    assert not loop.has_work


@torch.inference_mode()
def test_a_beam_that_is_not_finite_ends_its_turn_alone(monkeypatch):
    loop = make_loop(200)
    stream, other = begin(loop, PROMPT, 4), begin(loop, OTHER, 1)
    for _ in range(9):
        loop.step()
    turn = beam_turn(loop)
    assert turn is not None and len(turn.beams) == 4
    execute = loop.runner.execute

    def broken(batch, *arguments):
        tokens = execute(batch, *arguments)
        tokens.finite[:] = [item.sequence is not turn.beams[1] for item in batch.items]
        return tokens

    monkeypatch.setattr(loop.runner, "execute", broken)
    loop.step()
    monkeypatch.setattr(loop.runner, "execute", execute)
    run_out(loop)
    assert isinstance(list(stream)[-1].error, NonFiniteValues)
    plain = make_loop(200)
    alone = begin(plain, OTHER, 1)
    run_out(plain)
    assert result(other) == result(alone)


# -- through the engine ---------------------------------------------------------------------------------------------


def test_the_next_turn_continues_the_winner():
    engine, session = tiny_engine(), str(uuid.uuid4())
    try:
        first = run(engine, GenerateRequest(PROMPT, FULL, session, beams=BeamParams(3)))[-1]
        assert engine.inspect(session)["cache_pos"] == len(PROMPT) + 19
        prompt = (*PROMPT, *first.token_ids, *b" more")
        second = run(engine, GenerateRequest(prompt, FULL, session))[-1]
        assert second.stats.reused_tokens >= len(PROMPT) + len(first.token_ids) - 1
        assert run(engine, GenerateRequest(prompt, FULL))[-1].token_ids == second.token_ids
        assert engine.inspect(session)["beams"] == []
        engine.check_integrity()
    finally:
        engine.close()


def test_a_stop_string_ends_a_beam():
    engine = tiny_engine()
    try:
        whole = run(engine, GenerateRequest(PROMPT, FULL, beams=BeamParams(2)))[-1].text
        letter = whole[5]
        params = SamplingParams(max_tokens=20, ignore_eos=True, stop=(letter,))
        last = run(engine, GenerateRequest(PROMPT, params, beams=BeamParams(2)))[-1]
        assert letter not in last.text and last.stats.finish_reason == "stop"
        assert last.stats.generated_tokens < 20
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("beams", "params", "word"),
    [
        (BeamParams(2), {"repetition_penalty": 1.1}, "repetition_penalty"),
        (BeamParams(2), {"presence_penalty": 0.5}, "presence_penalty"),
        (BeamParams(2), {"logit_bias": {3: 1.0}}, "logit_bias"),
        (BeamParams(2), {"top_logprobs": 0}, "logprobs"),
    ],
)
def test_settings_that_change_or_report_single_tokens_are_refused(beams, params, word):
    engine = tiny_engine()
    try:
        with pytest.raises(InvalidRequest, match=word):
            engine.generate(GenerateRequest(PROMPT, SamplingParams(**params), beams=beams))
    finally:
        engine.close()


@pytest.mark.parametrize(
    "values",
    [
        (0,),
        (9,),
        (True,),
        (2.0,),
        (2, float("nan")),
        (2, 11),
        (2, "x"),
        (2, 1.0, "always"),
        (2, 1.0, None),
        (2, 1.0, 1),
    ],
)
def test_beam_settings_out_of_range_are_refused(values):
    with pytest.raises(InvalidRequest):
        BeamParams(*values)
