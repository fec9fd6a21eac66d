"""Comparing a KV format with float32 on a session's ids: true figures, in slices, and no reply is changed by it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from engine import replay
from engine.debugging import precision
from engine.debugging.protocol import PrecisionQuery
from engine.errors import ContextOverflow, EngineStopped, InvalidRequest
from engine.jobs import Jobs, run_through
from engine.protocol import GenerateRequest, TokenDelta
from engine.replay import Replay
from engine.sampling.params import SamplingParams
from kernels.kv_format import KV_FORMATS
from tests.support.engines import ENDLESS, LONG_CONTEXT, RecordingEngine, run, tiny_engine
from tests.support.tiny_models import tiny_model

IDS = tuple(torch.randint(1, 256, (150,), generator=torch.Generator().manual_seed(3)).tolist())
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


@pytest.fixture
def engine(request):
    """`request.param`, where a test has one, is its context."""
    engine = tiny_engine(context=getattr(request, "param", 512))
    yield engine
    engine.check_integrity()
    engine.close()


def reference(ids: tuple[int, ...], greedy: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of the ids and the greedy text after them, from transformers."""
    model = tiny_model("llama", vocab_size=271, max_position_embeddings=512)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        out = model.generate(torch.tensor([ids]), max_new_tokens=greedy, do_sample=False, eos_token_id=None)
    return logits, out[0, len(ids) :].tolist()


def coarse(engine: RecordingEngine, kv_format: str, ids: tuple[int, ...], greedy: int):
    """The same from a cache in few bits, in one go."""
    parts = engine._parts
    spec = replace(parts.cache.spec, format=KV_FORMATS[kv_format])
    again = Replay(parts.model, spec, len(ids) + greedy, parts.cache.balance)
    with torch.inference_mode():
        logits = again.extend(ids, len(ids))
        text = [int(logits[-1].argmax())]
        while len(text) < greedy:
            text.append(int(again.extend(text[-1:])[-1].argmax()))
    return logits, text


def test_float32_differs_in_nothing_from_float32(engine):
    found = engine.compare_precision(PrecisionQuery(IDS))
    assert (found["kv_format"], found["reference"], found["tokens"]) == ("fp32", "fp32", 64)
    assert found["mean_kl"] == found["max_kl"] == 0.0 and found["top1_agreement"] == 1.0
    assert found["parts_at"] is None and found["greedy_tokens"] == 32


@pytest.mark.parametrize("kv_format", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("count", [20, 100])
def test_the_figures_are_those_of_an_independent_computation(kv_format, count):
    engine = tiny_engine(kv_format=kv_format)
    try:
        found = engine.compare_precision(PrecisionQuery(IDS, count))
        exact, text = reference(IDS, 32)
        other, other_text = coarse(engine, kv_format, IDS, 32)
    finally:
        engine.close()
    p, q = log_softmax(exact[-count:].double(), -1), log_softmax(other[-count:].double(), -1)
    divergence = kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert found["kv_format"] == kv_format and found["tokens"] == count
    assert found["mean_kl"] == pytest.approx(float(divergence.mean()), rel=2e-2, abs=1e-6)
    assert found["max_kl"] == pytest.approx(float(divergence.max()), rel=2e-2, abs=1e-6)
    assert found["mean_kl"] > 0
    assert found["top1_agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    parts_at = next((index for index in range(32) if text[index] != other_text[index]), None)
    assert found["parts_at"] == parts_at
    if kv_format == "int4":
        assert parts_at is not None
    floor = found["floor"]
    assert (floor is None) == (kv_format == "bf16")
    assert floor is None or (0 < floor["mean_kl"] < found["mean_kl"] / 10 and floor["top1_agreement"] > 0.9)


def test_another_format_than_the_caches_own_has_its_own_balance(engine):
    """As in an engine that was started with it."""
    own = tiny_engine(kv_format="int4")
    try:
        expected = own.compare_precision(PrecisionQuery(IDS))
    finally:
        own.close()
    found = engine.compare_precision(PrecisionQuery(IDS, kv_format="int4"))
    assert found["mean_kl"] == pytest.approx(expected["mean_kl"], rel=1e-3)
    assert found["parts_at"] == expected["parts_at"]


def test_streams_run_on_unchanged_while_a_comparison_is_under_way():
    engine = tiny_engine(kv_format="int8")
    try:
        prompts = [IDS[:40], IDS[50:80]]
        alone = [run(engine, GenerateRequest(prompt, LONG))[-1].token_ids for prompt in prompts]
        sessions = [str(uuid.uuid4()) for _ in prompts]
        streams = [engine.generate(GenerateRequest(p, LONG, s)) for p, s in zip(prompts, sessions, strict=True)]
        readers = [iter(stream) for stream in streams]
        for reader in readers:
            assert any(isinstance(next(reader), TokenDelta) for _ in range(9))
        found: list[dict[str, object]] = []
        asking = threading.Thread(target=lambda: found.append(engine.compare_precision(PrecisionQuery(IDS))))
        asking.start()
        events = [list(reader) for reader in readers]
        asking.join(10)
        assert [event[-1].token_ids for event in events] == alone
        assert found[0]["mean_kl"] > 0
        engine.check_integrity()
    finally:
        engine.close()


@pytest.mark.parametrize("engine", [LONG_CONTEXT], indirect=True)
def test_a_comparison_takes_one_bounded_slice_after_each_step(engine, monkeypatch):
    """Never more than a mixed step's tokens at a time, and a step of the streams between any two."""
    order: list[tuple[str, int]] = []

    def noting(kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def note(batch, *arguments):
            order.append((kind, batch.token_count))
            return plain(batch, *arguments)

        return note

    monkeypatch.setattr(engine._steps().runner, "execute", noting("step", engine._steps().runner.execute))
    monkeypatch.setattr(replay, "build_metadata", noting("piece", replay.build_metadata))
    stream = engine.generate(GenerateRequest(IDS[:10], ENDLESS))
    next(iter(stream))
    engine.compare_precision(PrecisionQuery(IDS, 10))
    stream.cancel()
    list(stream)
    pieces = [index for index, (kind, _) in enumerate(order) if kind == "piece"]
    assert len(pieces) > 60 and max(order[index][1] for index in pieces) <= engine._parts.limits.mixed_batch_tokens
    assert all(order[index - 1][0] == "step" for index in pieces)


def test_memory_is_asked_for_first(monkeypatch):
    engine = tiny_engine(kv_budget=2 * 2**20)
    try:
        wanted = precision.scratch_bytes(engine._parts, PrecisionQuery(IDS, 256))
        assert engine.compare_precision(PrecisionQuery(IDS))["mean_kl"] == 0.0
        monkeypatch.setattr(precision, "Replay", None)  # not even begun
        monkeypatch.setattr(precision, "scratch_bytes", lambda parts, query: wanted + 2 * 2**20)
        with pytest.raises(InvalidRequest, match=r"needs \d+ MiB of scratch memory"):
            engine.compare_precision(PrecisionQuery(IDS, 256))
    finally:
        engine.close()


def test_what_is_held_at_one_time_is_what_was_asked_for(engine, monkeypatch):
    sizes: list[int] = []
    made = Replay.__init__

    def init(self, *arguments):
        made(self, *arguments)
        sizes.append(self.cache.reserved_bytes)

    monkeypatch.setattr(Replay, "__init__", init)
    engine.compare_precision(PrecisionQuery(IDS))
    logits = 2 * 64 * 4 * engine._parts.vocab_size
    assert len(sizes) == 2 and max(sizes) + logits == precision.scratch_bytes(engine._parts, PrecisionQuery(IDS))


def test_a_session_may_fill_the_context(engine):
    ids = tuple(i % 200 for i in range(engine._parts.max_seq_len))
    found = engine.compare_precision(PrecisionQuery(ids, 8))
    assert found["greedy_tokens"] == 1 and found["tokens"] == 8
    with pytest.raises(ContextOverflow):
        engine.compare_precision(PrecisionQuery((*ids, 1), 8))


@pytest.mark.parametrize(
    "query",
    [
        PrecisionQuery(()),
        PrecisionQuery(IDS, 0),
        PrecisionQuery(IDS, 257),
        PrecisionQuery(IDS, True),
        PrecisionQuery(IDS, kv_format="int5"),
        PrecisionQuery((1, 9999)),
    ],
)
def test_what_makes_no_sense_is_refused(engine, query):
    with pytest.raises(InvalidRequest):
        engine.compare_precision(query)


def test_a_model_without_keys_and_values_has_none_to_compare():
    engine = tiny_engine(kind="mamba2")
    try:
        with pytest.raises(InvalidRequest, match="no keys and values"):
            engine.compare_precision(PrecisionQuery(IDS))
    finally:
        engine.close()


def test_closing_the_engine_ends_a_comparison(monkeypatch):
    engine = tiny_engine()
    caught: list[BaseException] = []
    begun = threading.Event()
    plain = replay.build_metadata
    monkeypatch.setattr(replay, "build_metadata", lambda *arguments: (begun.set(), plain(*arguments))[1])

    def ask() -> None:
        try:
            for _ in range(1000):
                engine.compare_precision(PrecisionQuery(IDS))
        except EngineStopped as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(30)
    engine.close()
    asking.join(30)
    assert len(caught) == 1 and not asking.is_alive()


# -- the queue of jobs ----------------------------------------------------------------------------------------------


def counting(log: list[str], name: str, slices: int):
    for index in range(slices):
        log.append(f"{name}{index}")
        yield
    return name


def test_jobs_run_one_after_the_other_a_slice_at_a_time():
    jobs, log = Jobs(), []
    futures = [Future(), Future()]
    for future, name in zip(futures, "ab", strict=True):
        jobs.add(counting(log, name, 2), future)
    steps = 0
    while jobs:
        jobs.advance()
        steps += 1
    assert log == ["a0", "a1", "b0", "b1"] and steps == 6
    assert [future.result() for future in futures] == ["a", "b"]
    assert run_through(counting(log, "c", 3)) == "c"


def test_a_failing_or_cancelled_job_does_not_hold_up_the_next():
    def failing():
        yield
        raise ValueError("broken")

    jobs, log = Jobs(), []
    futures = [Future() for _ in range(3)]
    jobs.add(failing(), futures[0])
    jobs.add(counting(log, "b", 2), futures[1])
    jobs.add(counting(log, "c", 1), futures[2])
    futures[1].cancel()
    while jobs:
        jobs.advance()
    assert isinstance(futures[0].exception(), ValueError) and futures[2].result() == "c" and log == ["c0"]


def test_the_end_of_the_engine_ends_waiting_and_later_jobs():
    jobs, futures = Jobs(), [Future(), Future()]
    jobs.add(counting([], "a", 2), futures[0])
    jobs.close(EngineStopped("over"))
    jobs.add(counting([], "b", 2), futures[1])
    assert not jobs and all(isinstance(future.exception(0), EngineStopped) for future in futures)
