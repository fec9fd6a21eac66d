"""Whose fault a loop is: each cause is made on purpose, by a real engine over a tiny model, and has to be found."""

from __future__ import annotations

import copy
import threading
import uuid
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.debugging.diagnosis import audited
from engine.debugging.loops import find_loop
from engine.debugging.protocol import DiagnoseQuery, TokenMeasure
from engine.debugging.replays import distance_from_draw
from engine.errors import InvalidRequest, Stopped
from engine.protocol import Finished, GenerateRequest, TokenDelta
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingState, uniform
from tests.support.engines import RecordingEngine, loaded_model, run, tiny_engine

# With a seed: what is drawn anew with a temperature takes the random numbers of the reply's.
GREEDY = SamplingParams(temperature=0, seed=2, max_tokens=250, ignore_eos=True)
SOUND = {"verdict": "clean", "faults": []}


def prompt(seed: int, count: int = 20) -> tuple[int, ...]:
    return tuple(torch.randint(1, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def query_of(engine: RecordingEngine, request: GenerateRequest) -> DiagnoseQuery:
    """Generate, and ask about the reply as the app would."""
    events = run(engine, request)
    last = events[-1]
    assert isinstance(last, Finished)
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    measures = tuple(item for event in deltas for item in event.measures)
    # As sampled: of a random model's replies, many bytes form no character.
    ids = tuple(token_id for event in deltas for token_id in event.token_ids)
    assert len(measures) == len(ids)
    session_id = request.session_id or str(uuid.uuid4())
    return DiagnoseQuery(session_id, request.prompt_ids, ids, replace(request.params, seed=last.stats.seed), measures)


@pytest.fixture
def engine():
    engine = tiny_engine()
    yield engine
    engine.check_integrity()
    engine.close()


def by_run(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["run"]: item for item in found["evidence"]}


def test_a_reply_without_a_loop_needs_no_replay(engine):
    query = query_of(engine, GenerateRequest(prompt(0), replace(GREEDY, max_tokens=20)))
    found = engine.diagnose(query)
    assert (found["loop"], found["verdict"], found["evidence"], found["cure"]) == (None, "none", [], None)


def test_temperature_0_is_the_samplers_fault_and_the_advice_cures_it(engine):
    query = query_of(engine, GenerateRequest(prompt(2), GREEDY))
    found = engine.diagnose(query, SOUND)
    assert found["verdict"] == "sampler" and found["loop"]["repeats"] >= 3
    evidence = by_run(found)
    assert evidence["measures"]["first"] is None and evidence["measures"]["worst"] < 0.01
    assert evidence["fresh"]["loop"]["period"] == found["loop"]["period"] and evidence["fresh"]["parts_at"] is None
    assert evidence["advised"]["looped"] == 0 and evidence["audit"]["faults"] == 0
    cure = found["cure"]
    assert cure["params"] == {"temperature": 0.7, "repetition_penalty": 1.1}
    cured = run(engine, GenerateRequest(prompt(2), replace(GREEDY, seed=3, **cure["params"])))[-1]
    assert find_loop(cured.token_ids) is None


def test_a_model_that_loops_whatever_one_sets_is_at_fault_itself():
    model = copy.copy(loaded_model())
    head = model.head

    def stuck(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[:, 77] += 1e4
        return logits

    model.head = stuck
    engine = tiny_engine(model=model)
    try:
        found = engine.diagnose(query_of(engine, GenerateRequest(prompt(1), replace(GREEDY, temperature=0.7))), SOUND)
    finally:
        engine.close()
    assert (found["verdict"], found["cure"]) == ("model", None)
    assert all(by_run(found)[name]["looped"] for name in ("fresh", "greedy", "advised", "stronger"))


def ids_at(model, position: int, before_step=lambda length, cache: None) -> list[int | None]:
    """From now on, of each sequence that the model runs, the id at this position; None where it is not there yet.

    A sequence is known by its block there. One that parted from another behind the position has a copy of its block.
    """
    hidden_states, standing, by_block = model.hidden_states, [], {}

    def reading(token_ids, cache, meta, *rest):
        if meta.context_lens_host[0] == meta.query_lens[0]:
            by_block.clear()  # another cache
        index, first = position // cache.spec.block_size, 0
        standing[:] = []
        for row, (count, length) in enumerate(zip(meta.query_lens, meta.context_lens_host, strict=True)):
            start, found = length - count, None
            if length > position:
                block = int(meta.block_tables[0, row, index])
                if start <= position:
                    by_block[block] = by_block["parent"] = int(token_ids[first + position - start])
                found = by_block.setdefault(block, by_block["parent"])
            standing.append(found)
            before_step(length, cache)
            first += count
        return hidden_states(token_ids, cache, meta, *rest)

    model.hidden_states = reading
    return standing


def where(standing: list[int | None], token_id: int, rows: int) -> torch.Tensor:
    """bool [rows]: rows of logits whose sequence has this id; one sequence may have many rows, many have one each."""
    return torch.tensor([found == token_id for found in standing]).expand(rows)


def test_advice_that_comes_too_late_just_before_a_loop_is_tried_on_the_whole_reply():
    """What greedy wrote first leads into the loop whatever is set behind it; regenerated as advised it does not loop.
    It was called the model's fault, with penalties stronger than the cure needs."""
    model, at = copy.copy(loaded_model()), len(prompt(1))
    head, standing = model.head, ids_at(model, at)

    def stuck(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[:, 100:250] = logits.amax(-1, keepdim=True)  # so many that a sampler hardly ever draws 76
        logits[:, 76] = logits[:, 100] + 0.1
        logits[:, 77] += 1e4 * where(standing, 76, len(logits))
        return logits

    model.head = stuck
    engine = tiny_engine(model=model)
    try:
        found = engine.diagnose(
            query_of(engine, GenerateRequest(prompt(1), replace(GREEDY, max_tokens=60, seed=1))), SOUND
        )
    finally:
        engine.close()
    evidence = by_run(found)
    assert found["loop"]["start"] == evidence["advised"]["from_token"] == 1 and evidence["advised"]["looped"] == 5
    assert (evidence["anew"]["from_token"], evidence["anew"]["looped"]) == (0, 0)
    assert found["verdict"] == "sampler" and found["cure"]["params"] == evidence["anew"]["changed"]


def test_advice_that_leads_into_another_loop_from_the_start_is_no_cure():
    """Behind what greedy wrote the advised settings do not loop, but from the prompt on they come upon a token that
    greedy never draws, and loop behind it. It was called the sampler's fault, with a cure that did not cure."""
    model, at = copy.copy(loaded_model()), len(prompt(1))
    head, standing = model.head, ids_at(model, at)

    def stuck(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[:, 100:250] = logits.amax(-1, keepdim=True)
        first, led = where(standing, None, len(logits)), where(standing, 76, len(logits))
        logits[:, 76] = logits[:, 100] + 0.1 * first  # the likeliest, and hardly ever drawn
        logits[:, 78] = logits[:, 100] + 0.1 * led
        logits[:, 77] += 1e4 * (~first & ~led)
        return logits

    model.head = stuck
    engine = tiny_engine(model=model)
    try:
        found = engine.diagnose(
            query_of(
                engine, GenerateRequest(prompt(1), replace(GREEDY, max_tokens=60, seed=1, repetition_penalty=1.0))
            ),
            SOUND,
        )
    finally:
        engine.close()
    evidence = by_run(found)
    assert found["loop"]["start"] == evidence["advised"]["from_token"] == 1 and evidence["advised"]["looped"] == 0
    assert (evidence["anew"]["from_token"], evidence["anew"]["looped"]) == (0, 5)
    assert (found["verdict"], found["cure"]) == ("model", None)


def damaged_query(engine: RecordingEngine, seed: int) -> DiagnoseQuery:
    """A reply to a prompt whose cached keys and values are, in every layer, those of one token."""
    session_id = str(uuid.uuid4())
    first = prompt(seed, 60)
    run(engine, GenerateRequest(first, replace(GREEDY, max_tokens=4), session_id))

    def damage() -> None:
        sequence, cache = engine._steps().scheduler.find(session_id), engine._parts.cache
        tensors = cache.export_blocks(sequence.block_table)
        tensors["data"][:] = tensors["data"][3:4, :, :, :1].clone()
        cache.import_blocks(sequence.block_table, tensors)

    engine._call(damage)
    return query_of(engine, GenerateRequest((*first, *prompt(seed + 50, 6)), GREEDY, session_id))


def test_a_damaged_cache_is_told_by_what_the_model_thought_of_its_tokens():
    """Even where no audit is at hand: the live measures are not those of the ids."""
    engine = tiny_engine()
    try:
        replies = (damaged_query(engine, seed) for seed in range(20, 40))
        found = engine.diagnose(next(query for query in replies if find_loop(query.reply_ids)))
    finally:
        engine.close()
    assert found["verdict"] == "cache" and found["cure"]["repair"] is True
    moved = by_run(found)["measures"]
    assert moved["first"] is not None and moved["worst"] > moved["allowed"]


def test_an_audit_that_finds_a_fault_decides(engine):
    query = query_of(engine, GenerateRequest(prompt(2), GREEDY))
    fault = {"verdict": "fault", "faults": [{"kind": "shift"}], "sentence": "Layer 0 is shifted by 1."}
    found = engine.diagnose(query, fault)
    assert found["verdict"] == "cache" and by_run(found)["audit"]["sentence"] == "Layer 0 is shifted by 1."


def test_the_audit_is_asked_for_this_session():
    asked = []

    def audit(session_id, cancelled):
        asked.append(session_id)
        if cancelled():
            raise Stopped("The audit was stopped.")
        return SOUND

    assert audited(audit, "s", lambda: False) == SOUND and asked == ["s"]
    assert audited(None, "s", lambda: False) is None
    with pytest.raises(Stopped, match="diagnosis"):
        audited(audit, "s", lambda: True)


def test_a_loop_that_a_float32_cache_does_not_have_is_the_precisions_fault():
    """The model stands for one that int4 breaks: it gets stuck where its keys and values were kept so."""
    model = copy.copy(loaded_model())
    hidden_states, head = model.hidden_states, model.head
    formats = []

    def noting(token_ids, cache, *rest):
        formats.append(cache.kv_format)
        return hidden_states(token_ids, cache, *rest)

    def stuck(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[:, 77] += 1e4 * (formats[-1] == "int4")
        return logits

    model.hidden_states, model.head = noting, stuck
    engine = tiny_engine(model=model, kv_format="int4")
    try:
        query = query_of(engine, GenerateRequest(prompt(1), replace(GREEDY, temperature=0.7, max_tokens=80)))
        found = engine.diagnose(query, SOUND)
    finally:
        engine.close()
    evidence = by_run(found)
    assert found["verdict"] == "precision" and found["cure"]["params"]["kv_format"] == "fp16"
    assert evidence["fp32"]["mean_kl"] > 0.02 and evidence["fp32"]["looped"] == evidence["fp16"]["looped"] == 0
    assert evidence["fresh"]["looped"] >= 1 and evidence["measures"]["first"] is None


def test_what_the_format_wrote_before_the_loop_may_lead_into_it_in_any_format():
    """Behind the token with which int4 leads astray a float32 cache loops too. It was called the sampler's fault."""
    model, at = copy.copy(loaded_model()), len(prompt(1))
    boosted = []

    def note(length, cache):
        boosted[:] = [76] * (length == at and cache.kv_format == "int4")

    head, standing = model.head, ids_at(model, at, note)

    def stuck(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        logits[:, 76] += 1e4 * (1 if boosted else -1)
        logits[:, 77] += 1e4 * where(standing, 76, len(logits))
        return logits

    model.head = stuck
    engine = tiny_engine(model=model, kv_format="int4")
    try:
        query = query_of(engine, GenerateRequest(prompt(1), replace(GREEDY, temperature=0.7, max_tokens=80)))
        found = engine.diagnose(query, SOUND)
    finally:
        engine.close()
    evidence = by_run(found)
    assert evidence["fp32"]["looped"] == evidence["fp32"]["runs"] and evidence["fp32"]["mean_kl"] > 0.02, (
        "behind the token the format matters not"
    )
    assert (evidence["fp32_anew"]["from_token"], evidence["fp32_anew"]["looped"]) == (0, 0)
    assert evidence["fresh_anew"]["looped"] >= 3
    assert found["verdict"] == "precision" and found["cure"]["params"]["kv_format"] == "fp16"


def test_formats_are_compared_over_the_length_of_the_reply():
    """A float32 cache loops as well, but later than the reply was long. It was called the sampler's fault."""
    model = copy.copy(loaded_model())
    hidden_states, head = model.hidden_states, model.head
    seen = []

    def noting(token_ids, cache, meta, *rest):
        seen[:] = [(cache.kv_format, meta.context_lens_host[0])]
        return hidden_states(token_ids, cache, meta, *rest)

    def stuck(hidden: torch.Tensor) -> torch.Tensor:
        kv_format, length = seen[0]
        logits = head(hidden)
        at = 120 if kv_format == "int4" else len(prompt(1)) + 215
        logits[:, 77] += 1e4 * (length >= at)
        return logits

    model.hidden_states, model.head = noting, stuck
    engine = tiny_engine(model=model, kv_format="int4")
    try:
        query = query_of(engine, GenerateRequest(prompt(1), replace(GREEDY, temperature=0.7, max_tokens=200)))
        found = engine.diagnose(query, SOUND)
    finally:
        engine.close()
    assert found["loop"]["start"] > 90 and found["verdict"] == "precision"
    assert by_run(found)["fp32_anew"]["looped"] == 0 and by_run(found)["fp32_anew"]["tokens"] == 200


def test_a_recurrent_model_is_diagnosed_too():
    engine = tiny_engine(kind="bamba")
    try:
        found = [engine.diagnose(query_of(engine, GenerateRequest(prompt(seed), GREEDY))) for seed in range(2)]
    finally:
        engine.close()
    assert all(item["verdict"] in ("none", "sampler", "model") for item in found)


def test_streams_run_on_unchanged_meanwhile(engine):
    alone = run(engine, GenerateRequest(prompt(9), replace(GREEDY, max_tokens=60)))[-1].token_ids
    query = query_of(engine, GenerateRequest(prompt(2), GREEDY))
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(engine.diagnose(replace(query, max_tokens=100))))
    asking.start()
    assert run(engine, GenerateRequest(prompt(9), replace(GREEDY, max_tokens=60)))[-1].token_ids == alone
    asking.join(10)
    assert answers[0]["verdict"] == "sampler"


def test_it_stops_when_it_is_told_to(engine):
    query = query_of(engine, GenerateRequest(prompt(2), GREEDY))
    slices = []
    with pytest.raises(Stopped):
        engine.diagnose(replace(query, cancelled=lambda: slices.append(1) or len(slices) >= 5))
    assert len(slices) == 5


def test_what_makes_no_sense_is_refused(engine):
    query = query_of(engine, GenerateRequest(prompt(2), GREEDY))
    for changed in ({"max_tokens": 0}, {"kv_format": "int5"}, {"prompt_ids": ()}, {"reply_ids": (9999,)}):
        with pytest.raises(InvalidRequest):
            engine.diagnose(replace(query, **changed))


def test_measures_are_those_of_the_models_own_distribution(engine):
    query = query_of(engine, GenerateRequest(prompt(1), replace(GREEDY, temperature=0.9, seed=3, max_tokens=20)))
    with torch.inference_mode():
        from tests.support.tiny_models import tiny_model

        model = tiny_model("llama", vocab_size=271, max_position_embeddings=512)
        logits = model(torch.tensor([[*query.prompt_ids, *query.reply_ids]])).logits[0]
    for index, (token_id, found) in enumerate(zip(query.reply_ids, query.measures, strict=True)):
        logprobs = torch.log_softmax(logits[len(query.prompt_ids) + index - 1].double(), -1)
        assert found.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-3)
        assert found.entropy == pytest.approx(float(-(logprobs.exp() * logprobs).sum()), abs=1e-3)
        assert found.top1 == pytest.approx(float(logprobs.exp().max()), abs=1e-3)
        assert found.rank == int((logprobs > logprobs[token_id]).sum())
    assert isinstance(query.measures[0], TokenMeasure)


def test_how_far_a_draw_was_from_another_token():
    """Tokens 0 to 3 have shares .1, .2, .3, .4; the random number says which of them is drawn."""
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    state = SamplingState(SamplingParams(temperature=1.0, top_p=1.0, seed=1), (), 4)
    drawn = uniform(1, 0)
    edges = [0.0, 0.1, 0.3, 0.6, 1.0]
    for token_id in range(4):
        wanted = max(edges[token_id] - drawn, drawn - edges[token_id + 1], 0.0)
        assert distance_from_draw(logits, state, token_id) == pytest.approx(wanted, abs=1e-6)
    greedy = SamplingState(SamplingParams(temperature=0), (), 4)
    assert [distance_from_draw(logits, greedy, i) for i in range(4)] == pytest.approx([0.3, 0.2, 0.1, 0.0], abs=1e-6)
    few = SamplingState(SamplingParams(temperature=1.0, top_p=1.0, top_k=2, seed=1), (), 4)
    assert distance_from_draw(logits, few, 0) == 1.0
