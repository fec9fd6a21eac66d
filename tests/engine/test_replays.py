"""Replies drawn anew side by side are what each would be alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.debugging.replays import kept_as, redraw
from engine.jobs import run_through
from engine.sampling.params import SamplingParams
from tests.support.engines import tiny_engine

PROMPT, BEFORE = tuple(range(3, 40)), (7, 9, 11)
COUNT = 40
DRAWN = SamplingParams(temperature=0.9, repetition_penalty=1.2, ignore_eos=True)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "bamba"])
def test_replies_side_by_side_are_those_drawn_alone(kind):
    """Past a window, past the block in which they part, with a recurrent state; another number of them each step."""
    engine = tiny_engine(kind=kind)
    settings = [replace(DRAWN, seed=seed) for seed in range(5)]
    try:
        parts = engine._need_parts()
        kept = run_through(kept_as(parts, "fp32"))

        def drawn(of: list[SamplingParams]) -> list[tuple[int, ...]]:
            found = run_through(redraw(parts, kept, PROMPT, BEFORE, of, COUNT, lambda token_id: True))
            return [one.token_ids for one in found]

        together, alone = drawn(settings), [drawn([params])[0] for params in settings]
    finally:
        engine.close()
    assert len(set(alone)) == 5 and together == alone


def test_it_ends_once_most_agree_but_not_before_the_first_is_through():
    engine = tiny_engine()
    stuck = replace(DRAWN, logit_bias={77: 100.0}, repetition_penalty=1.0)
    free = replace(DRAWN, logit_bias={77: -100.0})
    try:
        parts = engine._need_parts()
        kept = run_through(kept_as(parts, "fp32"))

        def loops(of: list[SamplingParams]) -> list[bool]:
            found = run_through(redraw(parts, kept, PROMPT, BEFORE, of, COUNT, lambda token_id: True))
            return [one.loop is not None for one in found]

        assert loops([stuck, stuck, free]) == [True, True]
        assert loops([free, stuck, stuck]) == [False, True, True]
    finally:
        engine.close()
