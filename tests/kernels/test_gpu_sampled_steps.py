"""Whole steps of the engine with the device's sampler: the same replies, one copy to the host, bad values end turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from engine.errors import NonFiniteValues
from engine.models.decoder import DecoderModel
from engine.models.registry import load_model
from engine.protocol import Event, Failed, GenerateRequest, TokenDelta
from engine.sampling.params import SamplingParams
from engine.step_loop import StepLoop
from engine.turns.turn import QueueStream
from kernels.gpu import tuning
from kernels.registry import OPS
from tests.support.engines import tiny_parts
from tests.support.tiny_models import save_safetensors, tiny_model
from tests.support.tiny_tokenizer import chat_tokenizer

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="steps on a card have tests of their own")
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS = (tuple(b"The cat sat."), tuple(b"On a mat, so"), tuple(b"it looked up."))
READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


@pytest.fixture(autouse=True)
def quick_interpreter_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time by program, and need not compute what lies beyond a small vocabulary."""
    monkeypatch.setitem(tuning._TABLE, ("sample", 80), {"CHUNK": 512, "num_warps": 8})
    for name, capability in list(tuning._TABLE):
        if capability == 80 and name.startswith("dequant_ge"):
            values = {**tuning._TABLE[name, capability], "BLOCK_N": 512}
            monkeypatch.setitem(tuning._TABLE, (name, capability), values)


class Replies:
    """A step loop on this thread, and what became of each turn."""

    def __init__(self, **options: Any) -> None:
        configuration, load = tiny_parts(**options)
        self.loop = StepLoop(load(configuration))
        self.streams: list[QueueStream] = []

    def start(self, prompt: tuple[int, ...], params: SamplingParams, session_id: str | None = None) -> None:
        stream = QueueStream("", lambda: None)
        self.loop.turns.start(GenerateRequest(prompt, params, session_id), stream, lambda: None, time.perf_counter())
        self.streams.append(stream)

    @torch.inference_mode()
    def step(self) -> None:
        self.loop.step()

    def ends(self) -> list[tuple[int, ...] | Failed]:
        """Run until all is said: the ids that were sampled for each turn, or its error."""
        while self.loop.has_work:
            self.step()
        self.loop.check_integrity()
        ended, self.streams = [list(stream) for stream in self.streams], []
        return [events[-1] if isinstance(events[-1], Failed) else sampled(events) for events in ended]


def sampled(events: list[Event]) -> tuple[int, ...]:
    return tuple(i for event in events if isinstance(event, TokenDelta) for i in event.token_ids)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecoderModel, "samples_on_device", property(lambda model: True))


def test_replies_are_those_of_the_sampler_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of different lengths, begun one after another, so that rows change their owners."""
    asked = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=3, ignore_eos=True),
        replace(GREEDY, repetition_penalty=3.0, max_tokens=3),
        replace(GREEDY, presence_penalty=4.0, logit_bias={40: 9.0}, max_tokens=7),
        replace(GREEDY, repetition_penalty=1.5, max_tokens=4, top_logprobs=1),
        replace(GREEDY, frequency_penalty=1.0, repetition_penalty=0.5),
    ]

    def replies() -> list[tuple[int, ...] | Failed]:
        chat = Replies()
        for index, params in enumerate(asked):
            chat.start(PROMPTS[index % 3], params)
            chat.step()
        return chat.ends()

    expected = replies()
    assert [len(ids) for ids in expected if isinstance(ids, tuple)] == [5, 3, 3, 7, 4, 5]
    monkeypatch.setattr(DecoderModel, "samples_on_device", property(lambda model: True))
    assert replies() == expected


def test_replies_with_drafts_are_those_without(on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several drafts and replies in one launch; penalties have their reply go on token by token."""
    asked = [replace(GREEDY, max_tokens=14), SamplingParams(temperature=0.3, seed=5, max_tokens=9, ignore_eos=True),
             replace(GREEDY, repetition_penalty=1.1, max_tokens=6)]  # fmt: skip
    replies = {}
    for mode in ("off", "on"):
        chat = Replies(speculation=mode)
        for index, params in enumerate(asked):
            chat.start(PROMPTS[index] * 2, params)
        replies[mode] = chat.ends()
    assert replies["on"] == replies["off"]
    tokens = chat.loop.metrics.tokens
    assert tokens["drafted"] > tokens["accepted"] > 0


def poisoned_head(monkeypatch: pytest.MonkeyPatch, rows: int, bad_row: int) -> None:
    """The second step with this many rows of logits has one that is not a number."""
    head, steps = DecoderModel.head, iter((False, True))

    def bad(model: DecoderModel, hidden: torch.Tensor) -> torch.Tensor:
        logits = head(model, hidden)
        if len(hidden) == rows and next(steps, False):
            logits[bad_row, 7] = torch.nan
        return logits

    monkeypatch.setattr(DecoderModel, "head", bad)


def test_a_turn_with_bad_logits_ends_and_the_others_go_on(on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = []
    for prompt in PROMPTS:
        chat = Replies()
        chat.start(prompt, GREEDY)
        alone.append(chat.ends()[0])
    poisoned_head(monkeypatch, rows=3, bad_row=1)
    chat = Replies()
    for index, prompt in enumerate(PROMPTS):
        chat.start(prompt, GREEDY, str(index))
    first, failed, third = chat.ends()
    assert isinstance(failed, Failed) and isinstance(failed.error, NonFiniteValues)
    sequence = chat.loop.scheduler.find("1")
    assert sequence is not None and sequence.cache_pos == 0
    assert [first, third] == [alone[0], alone[2]]


def test_a_prefill_with_bad_states_ends_its_turn_and_not_the_one_beside_it(
    on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Replies()
    chat.start(PROMPTS[0], GREEDY)
    wanted = chat.ends()
    chat.start(PROMPTS[0], GREEDY)
    chat.step()
    states = DecoderModel.hidden_states

    def bad(model: DecoderModel, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden = states(model, token_ids, *rest)
        if len(token_ids) > 2:
            hidden[3] = torch.inf  # of the second sequence's third token
        return hidden

    monkeypatch.setattr(DecoderModel, "hidden_states", bad)
    chat.start(PROMPTS[1], GREEDY, "b")
    beside, failed = chat.ends()
    assert isinstance(failed, Failed) and isinstance(failed.error, NonFiniteValues)
    assert [beside] == wanted
    assert chat.loop.prefix_cache.match(PROMPTS[1]) == []


@contextmanager
def host_reads() -> Iterator[list[tuple[str, int]]]:
    """Which tensors Python code outside kernels looks into: (method, number of elements)."""
    found: list[tuple[str, int]] = []
    inside: list[bool] = []

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not inside:
                found.append((name, tensor.numel()))
            return method(tensor, *args, **kwargs)

        return read

    def unseen(run: Callable[..., None]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            inside.append(True)
            try:
                run(*args, **kwargs)
            finally:
                inside.pop()

        return launch

    with pytest.MonkeyPatch.context() as patch:
        for op in OPS.values():
            patch.setattr(op, "chosen", unseen(op.chosen))
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
        yield found


def test_a_steady_decode_step_copies_the_ids_to_the_host_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check of what is finite, and each row drawn, waited for the card."""
    model = tiny_model("llama", vocab_size=chat_tokenizer().vocab_size, num_hidden_layers=1)
    loaded = load_model(save_safetensors(model, tmp_path), torch.device("cpu"), "float32", triton=True)
    monkeypatch.setattr(DecoderModel, "stays_on_device", property(lambda model: True))
    chat = Replies(model=loaded, block_size=16)
    for prompt, changes in zip(
        PROMPTS,
        ({}, {"temperature": 1.0, "top_k": 5, "seed": 1}, {"repetition_penalty": 1.3, "logit_bias": {9: 1.0}}),
        strict=True,
    ):
        chat.start(prompt[:2], replace(GREEDY, max_tokens=3, **changes))
    chat.step()
    with host_reads() as reads:
        for _ in range(2):
            chat.step()
    assert reads == [("tolist", 3), ("tolist", 3)]
    assert [len(ids) for ids in chat.ends() if isinstance(ids, tuple)] == [3, 3, 3]


def test_the_sampler_in_torch_would_be_counted(on_device: None) -> None:
    """The counter sees what a request for log probabilities reads."""
    chat = Replies()
    chat.start(PROMPTS[0], replace(GREEDY, top_logprobs=2))
    chat.step()
    with host_reads() as reads:
        chat.step()
    assert len(reads) > 1
