"""What makes loops on purpose does what it says: keys too large for int4 alone, damage to one session alone, a sentence
known by heart."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.repetitions.cases import made_by
from benchmarks.repetitions.damage import KINDS, damage, with_outlier_keys, with_sentence_by_heart
from engine.protocol import GenerateRequest, TokenDelta
from engine.replay import Replay
from engine.sampling.params import SamplingParams
from tests.support.engines import RecordingEngine, loaded_model, run, tiny_engine

PROMPT = tuple(range(3, 60))


@pytest.mark.parametrize(("kv_format", "changes"), [("fp32", False), ("int4", True)])
def test_outlier_keys_change_what_int4_keeps_and_nothing_else(kv_format, changes):
    engine = tiny_engine(kv_format=kv_format)
    try:
        parts = engine._need_parts()
        before = Replay(parts.model, parts.cache.spec, 60, parts.cache.balance).extend(PROMPT)
        with_outlier_keys(engine)
        after = Replay(parts.model, parts.cache.spec, 60, parts.cache.balance).extend(PROMPT)
    finally:
        engine.close()
    assert torch.allclose(before, after, atol=1e-4) is not changes


@pytest.fixture
def engine() -> Iterator[RecordingEngine]:
    engine = tiny_engine()
    yield engine
    engine.check_integrity()
    engine.close()


def keys_of(engine: RecordingEngine, session_id: str) -> torch.Tensor:
    """[blocks, layers, block_size, heads, head_dim], and 0 where nothing was written yet."""

    def read() -> torch.Tensor:
        sequence = engine._steps().scheduler.find(session_id)
        assert sequence is not None
        keys = engine._need_parts().cache.export_blocks(sequence.block_table)["data"][:, :, 0].clone()
        for index, block in enumerate(keys):
            block[:, max(sequence.cache_pos - index * sequence.block_size, 0) :] = 0
        return keys

    return engine._call(read)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_to_one_sessions_last_keys(engine, kind):
    sessions = [str(uuid.uuid4()) for _ in range(2)]
    for session_id in sessions:
        run(engine, GenerateRequest(PROMPT, SamplingParams(temperature=0, max_tokens=1), session_id))
    before = [keys_of(engine, session_id) for session_id in sessions]
    damage(engine, sessions[0], kind)
    after = [keys_of(engine, session_id) for session_id in sessions]
    assert torch.equal(before[1], after[1]) and torch.equal(before[0][:, :-1], after[0][:, :-1])
    # The first key of each block is what the others are overwritten with.
    full = slice(0, len(PROMPT) // 4)
    changed = (before[0][full, -1, 1:] != after[0][full, -1, 1:]).flatten(1).any(1)
    assert bool(changed.all())


def test_a_sentence_known_by_heart_is_said_again_and_again_once_it_is_begun():
    engine = tiny_engine(model=copy.copy(loaded_model()))  # other tests have the same one
    try:
        with_sentence_by_heart(engine, "sing")
        ids = engine.tokenizer.encode(" sing")
        request = GenerateRequest((*PROMPT, ids[1]), SamplingParams(temperature=0.7, max_tokens=23, seed=1))
        deltas = [event for event in run(engine, request) if isinstance(event, TokenDelta)]
        with pytest.raises(ValueError, match="twice"):
            with_sentence_by_heart(engine, "all")
    finally:
        engine.close()
    said = [token_id for event in deltas for token_id in event.token_ids]
    assert len(ids) == 5 and said == [*ids[2:], *ids * 4]


def test_a_case_loops_mostly_with_its_factor_and_never_without():
    """Each reply by a letter; how often it loops with the factor and without it, of 4 runs."""
    runs = {"a": (3, 0), "b": (2, 0), "c": (4, 1), "d": (4, 0)}
    replies: Any = [SimpleNamespace(loop=True, name=name) for name in runs] + [SimpleNamespace(loop=None, name="e")]
    cases = made_by(
        lambda found: [(runs[reply.name][0], 4) for reply in found],  # type: ignore[attr-defined]
        lambda found: [(runs[reply.name][1], 4) for reply in found],  # type: ignore[attr-defined]
        replies,
    )
    assert [reply.name for reply in cases] == ["a", "d"]  # type: ignore[attr-defined]
