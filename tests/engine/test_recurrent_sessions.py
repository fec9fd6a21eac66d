"""Sessions of models with recurrent layers: what is reused, what is told, and that replies are those of a fresh run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from engine.debugging.protocol import ProbeQuery
from engine.errors import InvalidRequest, NonFiniteValues
from engine.protocol import Failed, Finished, GenerateRequest, TokenDelta
from engine.sampling.params import SamplingParams
from tests.support.engines import ENDLESS, LONG_CONTEXT, RecordingEngine, run, tiny_engine
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import chat_tokenizer

SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = tuple(b"The quick brown fox jumps over the lazy dogs")
OTHER = tuple(b"Paris is the capital of France, and Rome of ")
REPLY = tuple(chat_tokenizer().encode(" in a field."))
"""What a session says first: random models end their replies within characters, which aren't kept."""


@pytest.fixture(params=["bamba", "mamba2"])
def kind(request):
    return request.param


@pytest.fixture
def engine(kind) -> Iterator[RecordingEngine]:
    engine = tiny_engine(kind=kind)
    yield engine
    engine.check_integrity()
    engine.close()


def reply(engine: RecordingEngine, prompt: Sequence[int], session_id: str | None = None, **options) -> Finished:
    event = run(engine, GenerateRequest(tuple(prompt), options.pop("params", GREEDY), session_id, **options))[-1]
    assert isinstance(event, Finished), event
    return event


def assert_fresh(engine: RecordingEngine, kind: str, prompt: Sequence[int], found: Finished) -> None:
    """The ids are those of an engine that has computed nothing before."""
    fresh = tiny_engine(kind=kind)
    params = SamplingParams(temperature=0, max_tokens=found.stats.generated_tokens, ignore_eos=True)
    assert reply(fresh, prompt, params=params).token_ids == found.token_ids
    fresh.close()
    engine.check_integrity()


def first_reply(engine: RecordingEngine, session_id: str) -> tuple[int, ...]:
    """The history after a turn, all but the last token of which is in the cache."""
    first = reply(engine, PROMPT, session_id, forced_ids=REPLY)
    assert first.stats.cache_pos == len(PROMPT) + len(REPLY) - 1
    return (*PROMPT, *REPLY)


def state_of(engine: RecordingEngine, session_id: str) -> torch.Tensor:
    """The recurrence's state that the session's next step moves on."""
    steps, states = engine._steps(), engine._need_parts().states
    sequence = steps.scheduler.find(session_id)
    assert states is not None and sequence is not None and sequence.state is not None
    assert sequence.state.live is not None
    steps.runner.sync_blocks()
    return states.take((sequence.state.live,)).ssm


def test_greedy_replies_are_those_of_transformers(kind, engine):
    """From a cold and a warm start, alone and beside another reply."""
    vocab_size = engine.tokenizer.vocab_size
    reference = tiny_model(kind, vocab_size=vocab_size, max_position_embeddings=512)
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([PROMPT, OTHER]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    expected = [tuple(row) for row in out[:, len(PROMPT) :].tolist()]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for prompts in ((PROMPT,), (PROMPT, OTHER)):
        streams = [engine.generate(GenerateRequest(prompt, params, str(prompt[0]))) for prompt in prompts]
        found = [
            tuple(i for event in stream if isinstance(event, TokenDelta) for i in event.token_ids) for stream in streams
        ]
        assert found == expected[: len(prompts)]


def test_each_act_resumes_at_the_newest_checkpoint_and_says_what_it_cost(kind, engine):
    history = first_reply(engine, "s")
    end = len(history) - 1
    second = (*history, *b"How so?")
    assert engine.cached_prefix("s", second) == end
    following = reply(engine, second, "s")
    assert following.stats.reused_tokens == end and following.stats.miss is None
    edited = (*history, *b"Hardly?")
    other = reply(engine, edited, "s", cause="edit")
    assert other.stats.reused_tokens == end
    assert other.stats.miss.cause == "edit" and other.stats.miss.position == len(history) + 1
    assert other.stats.miss.tokens_lost == following.stats.cache_pos - end
    assert_fresh(engine, kind, edited, other)
    inside = (len(PROMPT) - 1) // SIZE * SIZE
    assert engine.cached_prefix("s", PROMPT) == inside
    again = reply(engine, PROMPT, "s", cause="regenerate")
    assert again.stats.reused_tokens == inside
    assert_fresh(engine, kind, PROMPT, again)
    assert again.stats.miss.tokens_lost == other.stats.cache_pos - inside
    changed = (*PROMPT[:20], *b"cat", *PROMPT[20:])
    last = reply(engine, changed, "s", cause="edit")
    assert last.stats.reused_tokens == 0 and last.stats.miss.tokens_lost == again.stats.cache_pos
    assert_fresh(engine, kind, changed, last)


def test_a_fork_goes_on_from_where_it_was_made(kind, engine):
    history = first_reply(engine, "s")
    engine.fork("s", "whole", history)
    engine.fork("s", "part", history[:42])
    assert engine.inspect("whole")["cache_pos"] == len(history) - 1
    assert engine.inspect("part")["cache_pos"] == 40, "43 tokens of the prompt and the end of the reply were kept"
    for name, prompt, reused in (
        ("whole", (*history, *b"A"), len(history) - 1),
        ("part", (*PROMPT[:42], *b"B"), 40),
        ("s", (*history, *b"C"), len(history)),  # at a block boundary: the fork has left a state there
    ):
        found = reply(engine, prompt, name)
        assert found.stats.reused_tokens == reused
        assert_fresh(engine, kind, prompt, found)


def test_a_stop_in_the_middle_of_a_step_leaves_no_half_made_state(kind, engine):
    """Each layer moves its state on in place, so a step that ends between two layers leaves one that never was."""
    history = first_reply(engine, "s")
    model, calls = engine._steps().runner.model, []
    before = model._operations

    def stopping(x, weight, eps):
        calls.append(len(x))
        if len(calls) == 2:
            streams[0].cancel()
        return before.rms_norm(x, weight, eps)

    longer = (*history, *b"some more words that take a step of their own")
    streams = []
    model._operations = replace(before, rms_norm=stopping)
    try:
        engine._call(lambda: streams.append(engine.generate(GenerateRequest(longer, GREEDY, "s"))))
        assert list(streams[0])[-1].stats.finish_reason == "cancelled"
    finally:
        model._operations = before
    assert all(engine.inspect("s")["invariants"].values())
    engine.check_integrity()
    again = reply(engine, longer, "s")
    assert again.stats.reused_tokens >= 40
    assert_fresh(engine, kind, longer, again)


def test_choices_of_one_prompt_compute_it_once(engine):
    """They belong to no session, so they meet at the last block boundary of the prompt."""
    streams = [engine.generate(GenerateRequest(PROMPT, GREEDY)) for _ in range(3)]
    results = [list(stream)[-1] for stream in streams]
    assert [found.stats.reused_tokens for found in results] == [0, 40, 40]
    assert len({found.token_ids for found in results}) == 1


def test_without_room_a_running_reply_starts_over_and_says_the_same(kind):
    """Of three long replies at once, blocks and states hold hardly two."""
    engine = tiny_engine(kind=kind, blocks=60, states=4, max_seq_len=128)
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    prompts = [PROMPT, OTHER, PROMPT[::-1]]
    streams = [engine.generate(GenerateRequest(prompt, params, str(i))) for i, prompt in enumerate(prompts)]
    for stream, prompt in zip(streams, prompts, strict=True):
        assert_fresh(engine, kind, prompt, list(stream)[-1])
    engine.close()


def test_a_session_that_lost_its_state_is_computed_again_and_told_so(kind):
    engine = tiny_engine(kind=kind, states=3)
    history = first_reply(engine, "s")
    for name in ("t", "u", "v"):
        reply(engine, OTHER, name)
    prompt = (*history, *b"next")
    second = reply(engine, prompt, "s")
    assert second.stats.miss.cause == "evicted" and second.stats.miss.tokens_lost == len(history) - 1
    assert_fresh(engine, kind, prompt, second)
    engine.close()


def test_bad_values_in_a_state_end_the_turn_and_roll_back_to_its_start(kind):
    """In the middle of a reply, beside one of another session, which goes on."""
    engine = tiny_engine(kind=kind, context=LONG_CONTEXT)
    history = first_reply(engine, "s")
    prompt = (*history, *b"next")
    beside = engine.generate(GenerateRequest(OTHER, replace(GREEDY, max_tokens=60), "beside"))
    stream = engine.generate(GenerateRequest(prompt, ENDLESS, "s"))
    events = []
    for event in stream:
        events.append(event)
        if sum(isinstance(event, TokenDelta) for event in events) == 5 and isinstance(event, TokenDelta):
            engine._call(lambda: state_of(engine, "s")[1, 0, 2, 3, 4].fill_(torch.nan))
    assert isinstance(events[-1], Failed) and isinstance(events[-1].error, NonFiniteValues)
    assert events[-1].stats.cache_pos == engine.inspect("s")["cache_pos"] == len(history) - 1
    report = engine.inspect("s")
    assert [name for name, holds in report["invariants"].items() if not holds] == ["values_finite"], "told until then"
    after = reply(engine, prompt, "s")
    assert all(engine.inspect("s")["invariants"].values())
    assert after.stats.reused_tokens >= len(history) - 1
    assert_fresh(engine, kind, prompt, after)
    assert_fresh(engine, kind, OTHER, list(beside)[-1])
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("states", [None, 2], ids=["with room", "without room for a checkpoint"])
def test_nothing_is_left_of_a_first_step_that_fails(kind, states):
    """`cache_pos` had not moved, but the state had; without a checkpoint of it the session starts over."""
    engine = tiny_engine(kind=kind, states=states)
    history = first_reply(engine, "s")
    prompt = (*history, *b"next")
    vector = engine._need_parts().model.weights.layers[-1].mixer_norm
    kept = vector.clone()
    with torch.inference_mode():
        vector[3] = torch.nan
    failed = run(engine, GenerateRequest(prompt, GREEDY, "s"))[-1]
    with torch.inference_mode():
        vector.copy_(kept)
    assert isinstance(failed, Failed) and isinstance(failed.error, NonFiniteValues)
    kept = len(history) - 1 if states is None else 0
    assert engine.inspect("s")["cache_pos"] == kept
    after = reply(engine, prompt, "s")
    assert after.stats.reused_tokens == kept
    assert_fresh(engine, kind, prompt, after)
    engine.close()


def test_a_reply_that_loses_its_end_goes_back_to_the_prompt(kind, engine):
    """A stop string takes tokens that were run; what remains of the reply is computed again with the next turn."""
    params = SamplingParams(temperature=0, max_tokens=40, stop=("field",))
    cut = reply(engine, PROMPT, "s", params=params, forced_ids=REPLY)
    assert cut.text == " in a " and cut.stats.cache_pos == engine.inspect("s")["cache_pos"] == 40
    prompt = (*PROMPT, *cut.token_ids, *b"next")
    after = reply(engine, prompt, "s")
    assert after.stats.reused_tokens == 40 and after.stats.miss is None
    assert_fresh(engine, kind, prompt, after)


def test_reports_add_up(kind, engine):
    end = len(first_reply(engine, "s")) - 1
    spec, states = engine._need_parts().cache.spec, engine._need_parts().states
    report, memory, known = engine.inspect("s"), engine.memory(), engine.capabilities()
    layers = {"bamba": (2, 2), "mamba2": (0, 3)}[kind]
    assert (known["num_layers"], known["state_layers"]) == layers
    assert known["state_bytes"] == states.spec.nbytes == layers[1] * (4 * 192 * 3 + 4 * 4 * 32 * 16)
    assert report["bytes_per_token"] == spec.bytes_per_token == layers[0] * 2 * 2 * 16 * 4
    assert report["bytes_used"] == end * spec.bytes_per_token + states.spec.nbytes
    assert report["state"]["checkpoints"] == [40, end]
    assert bool(report["blocks"]) == bool(layers[0]) and all(report["invariants"].values())
    assert memory["state_used"] == memory["state_reserved"] == 2 * states.spec.nbytes
    assert memory["sessions"]["s"]["state"] == states.spec.nbytes
    nothing = engine.inspect("nobody")
    assert nothing["bytes_used"] == 0 and nothing["state"]["checkpoints"] == []
    engine.release("s")
    assert engine.memory()["state_used"] == 0


def test_keys_can_be_looked_at_in_attention_layers_only(kind, engine):
    reply(engine, PROMPT, "s")
    if kind == "mamba2":
        with pytest.raises(InvalidRequest, match="no attention layers"):
            engine.probe("s", ProbeQuery("k", 0, 0, 0, 2, 2))
    else:
        assert len(engine.probe("s", ProbeQuery("k", 1, 0, 0, 2, 2))) == 2
        with pytest.raises(InvalidRequest, match="between 0 and 1"):
            engine.probe("s", ProbeQuery("k", 2, 0, 0, 2, 2))
