"""The engine thread on a tiny random model: reuse, cuts, concurrency, cancelling, faults."""

import threading
import time
import uuid
from dataclasses import replace

import pytest
import torch

from engine.debugging.protocol import ProbeQuery
from engine.errors import Conflict, ContextOverflow, EngineStopped, InvalidRequest, NonFiniteValues
from engine.protocol import Failed, Finished, GenerateRequest, PrefillProgress, TokenDelta
from engine.sampling.params import SamplingParams
from tests.support.engines import ENDLESS, LONG_CONTEXT, run, tiny_engine
from tests.support.tiny_tokenizer import chat_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, top_logprobs=3)
PROMPT = tuple(b"The cat sat on the mat and looked at the moon.")


@pytest.fixture
def engine():
    engine = tiny_engine()
    yield engine
    engine.check_integrity()
    engine.close()


@pytest.fixture
def roomy():
    engine = tiny_engine(context=LONG_CONTEXT)
    yield engine
    engine.check_integrity()
    engine.close()


def reply(engine, prompt=PROMPT, session_id=None, params=GREEDY, **options) -> Finished:
    event = run(engine, GenerateRequest(tuple(prompt), params, session_id, **options))[-1]
    assert isinstance(event, Finished), event
    return event


def ids(text: str) -> tuple[int, ...]:
    return tuple(chat_tokenizer().encode(text))


def logprobs(events) -> list[float]:
    return [lp.logprob for event in events if isinstance(event, TokenDelta) for lp in event.logprobs]


def test_a_turn_reports_prefill_tokens_and_numbers_that_add_up(engine):
    events = run(engine, GenerateRequest(PROMPT, GREEDY, str(uuid.uuid4())))
    stats = events[-1].stats
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert sum(len(event.token_ids) for event in deltas) == stats.generated_tokens == 8
    assert "".join(event.text for event in deltas) == events[-1].text
    assert stats.reused_tokens + stats.computed_tokens == stats.prompt_tokens == len(PROMPT)
    assert stats.cache_pos == len(PROMPT) + 7  # the last sampled token is pending
    assert stats.finish_reason == "length"


def test_a_second_turn_computes_only_its_own_tokens(engine):
    session_id = str(uuid.uuid4())
    first = reply(engine, session_id=session_id)
    prompt = (*PROMPT, *first.token_ids, *b" And then?")
    second = reply(engine, prompt, session_id)
    assert second.stats.reused_tokens == first.stats.cache_pos
    assert second.stats.miss is None
    assert reply(engine, prompt).token_ids == second.token_ids


def test_an_edit_cuts_at_the_first_different_token_and_says_so(engine):
    session_id = str(uuid.uuid4())
    reply(engine, session_id=session_id)
    edited = (*PROMPT[:30], *b"XYZ")
    stats = reply(engine, edited, session_id, cause="edit").stats
    assert stats.reused_tokens == 30
    assert stats.miss is not None
    assert (stats.miss.position, stats.miss.cause) == (30, "edit")
    assert (stats.miss.cached_token, stats.miss.wanted_token) == (PROMPT[30], ord("X"))
    assert stats.miss.tokens_lost == len(PROMPT) + 7 - 30


def test_regenerating_evaluates_one_token_and_gives_the_same_reply(engine):
    session_id = str(uuid.uuid4())
    first = reply(engine, session_id=session_id)
    again = reply(engine, session_id=session_id, cause="regenerate")
    assert again.stats.reused_tokens == len(PROMPT) - 1
    assert again.token_ids == first.token_ids


def test_other_sessions_share_full_blocks_only_by_equal_ids(engine):
    first, second = str(uuid.uuid4()), str(uuid.uuid4())
    reply(engine, session_id=first)
    stats = reply(engine, (*PROMPT[:20], *b"other"), second).stats
    assert stats.reused_tokens == 20
    blocks = engine.inspect(second)["blocks"]
    assert [block["ref_count"] for block in blocks[:5]] == [2] * 5
    assert all(block["ref_count"] == 1 for block in blocks[5:])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_long_prompts_in_chunks_and_many_at_once_equal_one_alone(kind):
    """A decode beside other sessions' prefills must not change what a session says."""
    engine = tiny_engine(kind=kind)
    prompts = [tuple((7 * i + j * j) % 256 for j in range(40 + 90 * i)) for i in range(5)]
    alone = []
    for prompt in prompts:
        alone.append(reply(engine, prompt).token_ids)
        engine._call(lambda: engine._steps().prefix_cache.evict(10_000))
    streams = [engine.generate(GenerateRequest(prompt, GREEDY)) for prompt in prompts]
    assert [list(stream)[-1].token_ids for stream in streams] == alone
    engine.check_integrity()
    engine.close()


def test_cancel_ends_a_reply_and_keeps_what_was_said(roomy):
    engine, session_id = roomy, str(uuid.uuid4())
    stream = engine.generate(GenerateRequest(PROMPT, ENDLESS, session_id))
    events = []
    for event in stream:
        events.append(event)
        if isinstance(event, TokenDelta):
            stream.cancel()
            stream.cancel()
    final = events[-1]
    assert isinstance(final, Finished) and final.stats.finish_reason == "cancelled"
    assert final.text == "".join(event.text for event in events if isinstance(event, TokenDelta))
    report = engine.inspect(session_id)
    assert report["token_ids"] == list((*PROMPT, *final.token_ids))[: report["cache_pos"]]
    assert all(report["invariants"].values())


def test_one_turn_per_session(roomy):
    engine, session_id = roomy, str(uuid.uuid4())
    stream = engine.generate(GenerateRequest(PROMPT, ENDLESS, session_id))
    with pytest.raises(Conflict):
        engine.generate(GenerateRequest(PROMPT, GREEDY, session_id))
    stream.cancel()
    list(stream)
    reply(engine, session_id=session_id)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [((), InvalidRequest), ((1, 5000), InvalidRequest), ((-1,), InvalidRequest), ((5,) * 512, ContextOverflow)],
)
def test_impossible_prompts_are_refused_in_one_sentence(engine, prompt, error):
    with pytest.raises(error):
        engine.generate(GenerateRequest(prompt, GREEDY))
    reply(engine)


def test_a_reply_never_passes_the_context(engine):
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=10_000)
    final = reply(engine, (5,) * 505, params=params)
    assert final.stats.generated_tokens == 7 and final.stats.finish_reason == "length"


def test_forced_ids_take_the_way_of_sampled_ones(engine):
    forced = ids("hello")
    events = run(engine, GenerateRequest(PROMPT, GREEDY, forced_ids=forced))
    assert events[-1].text == "hello" and events[-1].token_ids == forced
    assert len(logprobs(events)) == 5


def test_forced_and_free_tokens_have_the_same_logprobs(engine):
    free = run(engine, GenerateRequest(PROMPT, GREEDY))
    ids = tuple(i for event in free if isinstance(event, TokenDelta) for i in event.token_ids)
    forced = run(engine, GenerateRequest(PROMPT, GREEDY, forced_ids=ids))
    assert logprobs(forced) == pytest.approx(logprobs(free), abs=1e-4)


def test_a_stop_string_ends_the_reply_and_the_cache_holds_only_the_history(engine):
    session_id = str(uuid.uuid4())
    params = SamplingParams(temperature=0, stop=("lo w",), max_tokens=50)
    final = reply(engine, session_id=session_id, params=params, forced_ids=ids("hello world"))
    assert final.text == "hel" and final.token_ids == ids("hel") and final.stats.finish_reason == "stop"
    assert engine.inspect(session_id)["token_ids"] == list(PROMPT + ids("hel"))


def test_an_end_token_ends_the_reply_is_not_shown_and_is_not_run_twice(engine):
    session_id = str(uuid.uuid4())
    end = max(engine.tokenizer.eos_ids)
    params = SamplingParams(temperature=0)
    final = reply(engine, session_id=session_id, params=params, forced_ids=(*ids("hi"), end, *ids("assistant")))
    assert final.text == "hi" and final.stats.finish_reason == "stop" and final.stats.generated_tokens == 3
    following = reply(engine, (*PROMPT, *ids("hi"), end, *ids("more")), session_id)
    assert following.stats.reused_tokens == len(PROMPT) + 2 and following.stats.miss is None


def test_bad_values_end_the_turn_and_roll_back_to_its_start(engine):
    session_id, other = str(uuid.uuid4()), str(uuid.uuid4())
    first = reply(engine, session_id=session_id)
    prompt = (*PROMPT, *first.token_ids, *b"next")
    vector = engine._need_parts().model.weights.layers[1].mixer_norm
    kept = vector.clone()
    with torch.inference_mode():
        vector[3] = float("nan")
    try:
        failed = run(engine, GenerateRequest(prompt, GREEDY, session_id))[-1]
    finally:
        with torch.inference_mode():
            vector.copy_(kept)
    assert isinstance(failed, Failed) and isinstance(failed.error, NonFiniteValues)
    assert engine.inspect(session_id)["cache_pos"] == first.stats.cache_pos
    after = reply(engine, prompt, session_id)
    assert after.stats.reused_tokens == first.stats.cache_pos
    assert reply(engine, session_id=other).token_ids == first.token_ids
    fresh = tiny_engine()
    assert reply(fresh, prompt).token_ids == after.token_ids
    fresh.close()


def test_an_evicted_session_is_computed_again_with_the_same_result_and_told_so():
    engine = tiny_engine(blocks=40, max_seq_len=128)
    session_id = str(uuid.uuid4())
    first = reply(engine, session_id=session_id)
    prompt = (*PROMPT, *first.token_ids, *b"next")
    for start in range(3):
        reply(engine, [(start * 31 + i) % 200 for i in range(118)], str(uuid.uuid4()))
    second = reply(engine, prompt, session_id)
    assert second.stats.miss is not None and second.stats.miss.cause == "evicted"
    assert second.stats.miss.tokens_lost == first.stats.cache_pos - second.stats.miss.position
    fresh = tiny_engine()
    assert reply(fresh, prompt).token_ids == second.token_ids
    fresh.close()
    engine.check_integrity()
    engine.close()


def test_more_replies_than_memory_all_finish_with_the_same_ids():
    """Eight replies on a pool that holds about two: some wait, some are preempted, none differs."""
    roomy, tight = tiny_engine(), tiny_engine(blocks=36, max_seq_len=128)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    prompts = [tuple((i * 37 + j) % 256 for j in range(30)) for i in range(8)]
    expected = [reply(roomy, prompt, params=params).token_ids for prompt in prompts]
    streams = [tight.generate(GenerateRequest(prompt, params)) for prompt in prompts]
    assert [list(stream)[-1].token_ids for stream in streams] == expected
    tight.check_integrity()
    tight.close()
    roomy.close()


def test_a_stop_does_not_wait_for_the_end_of_a_prefill(engine):
    """A stop came back only when the running chunk of the prompt had gone through all layers."""
    model = engine._steps().runner.model
    run_layers, layers = model._operations.swiglu, []
    first_layer, go_on = threading.Event(), threading.Event()

    def slow(x):
        layers.append(len(x))
        first_layer.set()
        assert go_on.wait(10)
        return run_layers(x)

    session_id, before = str(uuid.uuid4()), model._operations
    model._operations = replace(before, swiglu=slow)
    try:
        stream = engine.generate(GenerateRequest(PROMPT, GREEDY, session_id))
        assert first_layer.wait(10)
        stream.cancel()
        go_on.set()
        last = list(stream)[-1]
    finally:
        model._operations = before
    assert isinstance(last, Finished) and last.stats.finish_reason == "cancelled" and last.token_ids == ()
    assert len(layers) == 1 < len(model.weights.layers), "the second layer was not run for nobody"
    assert engine.inspect(session_id)["cache_pos"] == 0 and all(engine.inspect(session_id)["invariants"].values())
    fresh = tiny_engine()
    assert reply(engine, PROMPT, session_id).token_ids == reply(fresh, PROMPT).token_ids
    fresh.close()


def test_a_stop_leaves_the_others_of_its_step_alone(engine):
    """Only a step that nobody waits for any more is abandoned."""
    expected = reply(engine, tuple(range(60, 100))).token_ids
    streams = [engine.generate(GenerateRequest(tuple(range(60, 100)), GREEDY)) for _ in range(3)]
    streams[0].cancel()
    streams[2].cancel()
    assert list(streams[1])[-1].token_ids == expected


def test_a_fork_shares_the_cache_and_neither_disturbs_the_other(engine):
    parent, child = str(uuid.uuid4()), str(uuid.uuid4())
    first = reply(engine, session_id=parent)
    engine.fork(parent, child, (*PROMPT, *first.token_ids))
    left, right = (*PROMPT, *first.token_ids, *b"left"), (*PROMPT, *first.token_ids, *b"right")
    assert reply(engine, right, child).stats.reused_tokens == first.stats.cache_pos
    assert reply(engine, left, parent).stats.reused_tokens == first.stats.cache_pos
    fresh = tiny_engine()
    for prompt, session_id in ((left, parent), (right, child)):
        assert engine.inspect(session_id)["token_ids"][: len(prompt)] == list(prompt)
        assert reply(fresh, prompt).token_ids == reply(engine, prompt, session_id).token_ids
    fresh.close()


def test_release_frees_what_only_that_session_used(engine):
    session_id = str(uuid.uuid4())
    reply(engine, session_id=session_id)
    assert engine.memory()["kv_used"] > 0
    engine.release(session_id)
    engine.release("never seen")
    assert engine.memory()["kv_used"] == 0
    assert engine.inspect(session_id)["cache_pos"] == 0


def test_probe_reads_what_the_kernel_reads(engine):
    session_id = str(uuid.uuid4())
    reply(engine, session_id=session_id)
    rows = engine.probe(session_id, ProbeQuery("k", layer=1, head=1, start=3, count=4, dims=5))
    assert [row["position"] for row in rows] == [3, 4, 5, 6]
    assert [row["token_id"] for row in rows] == list(PROMPT[3:7])
    assert all(len(row["values"]) == 5 and row["norm"] > 0 for row in rows)
    twin = str(uuid.uuid4())
    reply(engine, session_id=twin)
    assert engine.probe(twin, ProbeQuery("k", 1, 1, 3, 4, 5)) == rows


def test_a_probe_ends_where_the_cache_does(engine):
    session_id = str(uuid.uuid4())
    cache_pos = reply(engine, session_id=session_id).stats.cache_pos
    assert [row["position"] for row in engine.probe(session_id, ProbeQuery(start=cache_pos - 2))] == [
        cache_pos - 2,
        cache_pos - 1,
    ]
    for start in (cache_pos, 10_000):
        assert engine.probe(session_id, ProbeQuery(start=start)) == []
    assert len(engine.probe(session_id, ProbeQuery(count=4096))) == cache_pos
    assert [len(row["values"]) for row in engine.probe(session_id, ProbeQuery(count=1, dims=16))] == [16]
    assert [len(row["values"]) for row in engine.probe(session_id, ProbeQuery(count=1))] == [10]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (ProbeQuery("q"), ["tensor", '"k"', '"v"']),
        (ProbeQuery(layer=2), ["layer", "0 and 1"]),
        (ProbeQuery(layer=-1), ["layer", "0 and 1"]),
        (ProbeQuery(head=2), ["head", "0 and 1"]),
        (ProbeQuery(head=-1), ["head", "0 and 1"]),
        (ProbeQuery(start=-1), ["start", "at least 0"]),
        (ProbeQuery(count=-1), ["count", "0 and 4096"]),
        (ProbeQuery(count=4097), ["count", "0 and 4096"]),
        (ProbeQuery(dims=0), ["dims", "1 and 16", "head"]),
        (ProbeQuery(dims=17), ["dims", "1 and 16", "head"]),
    ],
)
def test_a_probe_outside_the_model_names_its_bounds(engine, query, words):
    """More values than a head has were silently fewer."""
    with pytest.raises(InvalidRequest) as refused:
        engine.probe(str(uuid.uuid4()), query)
    assert all(word in str(refused.value) for word in words), refused.value


def test_an_unexpected_error_reaches_every_open_and_every_later_request():
    engine = tiny_engine(context=LONG_CONTEXT)
    streams = [engine.generate(GenerateRequest(PROMPT, ENDLESS)) for _ in range(3)]
    next(iter(streams[0]))

    def broken(*_):
        raise RuntimeError("boom")

    engine._steps().runner.execute = broken
    for stream in streams:
        last = list(stream)[-1]
        assert isinstance(last, Failed) and isinstance(last.error, EngineStopped)
        assert "RuntimeError" in str(last.error)
    assert engine.status() == "stopped"
    with pytest.raises(EngineStopped):
        engine.generate(GenerateRequest(PROMPT, GREEDY))
    with pytest.raises(EngineStopped):
        engine.inspect(str(uuid.uuid4()))


def test_close_ends_running_replies_with_what_they_have():
    engine = tiny_engine(context=LONG_CONTEXT)
    stream = engine.generate(GenerateRequest(PROMPT, ENDLESS))
    iterator = iter(stream)
    assert isinstance(next(iterator), PrefillProgress | TokenDelta)
    engine.close()
    last = list(iterator)[-1]
    assert isinstance(last, Finished) and last.stats.finish_reason == "cancelled"
    engine.close()


def test_a_failed_load_is_told_to_whoever_waits(tmp_path):
    from engine.config import EngineConfig
    from engine.errors import ModelFileError
    from engine.local import LocalEngine

    def load(_):
        raise ModelFileError("There is no such model.")

    engine = LocalEngine(EngineConfig(data_dir=tmp_path, snapshot_limit=0), load)
    engine.start()
    with pytest.raises(ModelFileError):
        engine.wait_ready(10)
    assert engine.status() == "stopped"
    engine.close()


def test_many_threads_hammering_one_engine_all_get_their_own_reply(engine):
    """Three kinds of caller at the same moment, some on one session: every reply that finishes is the right one."""
    expected = {text: reply(engine, text.encode()).token_ids for text in ("alpha beta", "gamma delta", "epsilon")}
    session_id = str(uuid.uuid4())
    wrong: list[object] = []

    def work(text: str, session: str | None) -> None:
        for _ in range(15):
            try:
                if reply(engine, text.encode(), session).token_ids != expected[text]:
                    wrong.append(text)
            except Conflict:
                time.sleep(0.001)

    threads = [
        threading.Thread(target=work, args=("alpha beta", None)),
        threading.Thread(target=work, args=("gamma delta", session_id)),
        threading.Thread(target=work, args=("epsilon", session_id)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
