"""Beam search: the same replies as transformers', one copy of the prompt's blocks, everything given back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.local import LocalEngine
from engine.protocol import Finished, GenerateRequest, TokenDelta, TurnStats
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams
from tests.support.engines import RecordingEngine, run, tiny_engine
from tests.support.tiny_models import tiny_model

PROMPT = tuple(b"The cat sat on the mat and looked at the moon.")
VOCAB = 271
SIZE = 4
PENALTIES, STOPPINGS = (1.0, 0.0, 2.0), (False, True, "never")
# The search is the same for all architectures, what a beam takes over from another is not.
SETTINGS = [("llama", *rest) for rest in product((2, 4), PENALTIES, STOPPINGS)] + [
    (kind, *rest)
    for kind in ("qwen2", "qwen3", "bamba", "mamba2")
    for rest in ((2, 0.0, True), (4, 1.0, False), (4, 2.0, "never"))
]
SETTINGS_OF_ONE_LENGTH = list(dict.fromkeys(setting[:3] for setting in SETTINGS))
"""Without an end token there is nothing to stop at early."""


def searched(
    engine: LocalEngine, beams: BeamParams, session: str | None = None, prompt: tuple[int, ...] = PROMPT, **params: Any
) -> tuple[tuple[int, ...], TurnStats]:
    """The reply's ids, its end token left out, and the turn's numbers."""
    events = run(engine, GenerateRequest(prompt, SamplingParams(**params), session, beams=beams))
    assert isinstance(events[-1], Finished), events[-1]
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    return tuple(token_id for event in deltas for token_id in event.token_ids), events[-1].stats


@cache
def reference(kind: str) -> PreTrainedModel:
    return tiny_model(kind, vocab_size=VOCAB, max_position_embeddings=512)


def expected(kind: str, count: int, eos: list[int] | None, beams: BeamParams) -> tuple[int, ...]:
    """The reply of `transformers`, its end token left out."""
    with torch.no_grad():
        out = reference(kind).generate(
            torch.tensor([PROMPT]),
            max_new_tokens=count,
            do_sample=False,
            num_beams=beams.num_beams,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
            eos_token_id=eos,
            pad_token_id=0,
        )
    ids = tuple(out[0, len(PROMPT) :].tolist())
    ends = [index for index, token_id in enumerate(ids) if eos and token_id in eos]
    return ids[: ends[0]] if ends else ids


@pytest.fixture(scope="module")
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(kind) -> Iterator[RecordingEngine]:
    engine = tiny_engine(kind=kind)
    yield engine
    engine.check_integrity()
    engine.close()


@pytest.fixture(scope="module")
def frequent_tokens(engine: LocalEngine) -> list[int]:
    """Tokens that beams come by, to serve as end tokens."""
    ids, _ = searched(engine, BeamParams(4), max_tokens=48, ignore_eos=True)
    return sorted({ids[9], ids[17]})


@pytest.mark.parametrize(("kind", "num_beams", "penalty"), SETTINGS_OF_ONE_LENGTH, indirect=["kind"])
def test_without_an_end_token_the_reply_is_that_of_transformers(kind, engine, num_beams, penalty):
    beams = BeamParams(num_beams, penalty)
    ids, stats = searched(engine, beams, max_tokens=24, ignore_eos=True)
    assert ids == expected(kind, 24, None, beams)
    assert stats.finish_reason == "length" and stats.generated_tokens == 24


@pytest.mark.parametrize(("kind", "num_beams", "penalty", "early_stopping"), SETTINGS, indirect=["kind"])
def test_with_end_tokens_the_reply_is_that_of_transformers(
    kind, engine, num_beams, penalty, early_stopping, frequent_tokens, monkeypatch
):
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset(frequent_tokens))
    beams = BeamParams(num_beams, penalty, early_stopping)
    ids, stats = searched(engine, beams, max_tokens=48)
    assert ids == expected(kind, 48, frequent_tokens, beams)
    assert stats.generated_tokens == len(ids) + (stats.finish_reason == "stop")
