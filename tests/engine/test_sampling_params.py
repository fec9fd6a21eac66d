"""Settings of the sampler that come from a store or a page: any value is taken, or refused with its bounds."""

from __future__ import annotations

import math

import pytest

from engine.errors import InvalidRequest
from engine.sampling.params import MAX_SEED, MAX_TOKENS, SamplingParams
from ui.api.params import parse_params

NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
           "max_tokens", "max_completion_tokens", "seed", "top_logprobs")  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 10**5000, -(10**5000), "x" * 10_000, {}, True],
    ids=["nan", "inf", "-inf", "huge", "-huge", "text", "object", "true"],
)
def test_what_makes_no_sense_is_one_short_sentence_with_bounds(name, value):
    """A number of thousands of digits, as a page may send it, ended in an error of Python's own."""
    with pytest.raises(InvalidRequest) as refused:
        parse_params({name: value})
    sentence = str(refused.value)
    assert sentence.startswith(f"{name} must be") and " from " in sentence and " to " in sentence
    assert len(sentence) < 160


def test_the_bounds_themselves_are_values():
    params = parse_params({"max_tokens": MAX_TOKENS, "seed": MAX_SEED, "temperature": 100, "top_k": 0})
    assert params == SamplingParams(max_tokens=2**31 - 1, seed=2**63 - 1, temperature=100, top_k=0)
