"""Advice on the context limit, from the lengths of real turns."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ui.advice import NEEDED_TURNS, advise, distribution, percentile, recommended_len


def price(tokens: int) -> int:
    return -(-tokens // 16) * 16 * 1000


LENGTHS = st.lists(st.integers(1, 5000), min_size=NEEDED_TURNS, max_size=300)


@given(LENGTHS, st.integers(1, 100))
def test_percentiles_are_the_smallest_length_that_enough_do_not_exceed(lengths, percent):
    """By their definition: numpy multiplies in floating point, and takes the next value where 7 comes out above 7."""
    reached = [length for length in lengths if 100 * sum(n <= length for n in lengths) >= percent * len(lengths)]
    assert percentile(sorted(lengths), percent) == min(reached)


@given(LENGTHS)
def test_the_distribution_rises_to_one_and_tells_the_truth(lengths):
    points = distribution(sorted(lengths))
    assert len(points) <= 100 and points[-1] == (max(lengths), 1.0)
    for (left, low), (right, high) in itertools.pairwise(points):
        assert left < right and low < high
    for length, share in points:
        assert share == sum(item <= length for item in lengths) / len(lengths)


@given(st.integers(1, 10**6), st.sampled_from([1, 4, 16, 32]))
def test_the_recommendation_is_the_smallest_whole_number_of_blocks_with_room(p99, block_size):
    found = recommended_len(p99, block_size)
    assert found % block_size == 0 and found >= math.ceil(p99 * 1.1 - 1e-6) > found - block_size


def test_advice_adds_up():
    lengths = [*range(10, 1000, 10), 5000]
    random.Random(1).shuffle(lengths)
    found = advise(lengths, 8192, 16, price)
    assert (found["turns"], found["p50"], found["p95"], found["p99"]) == (100, 500, 950, 990)
    assert found["recommended"] == 1104  # 990 and a tenth more: 1089, in blocks of 16
    assert found["saved_bytes"] == (8192 - 1104) * 1000
    assert "--max-seq-len 1104" in found["text"] and "already take only what is used" in found["text"]
    assert found["at_limit"] == 0


def test_turns_that_fill_the_context_are_no_reason_to_lower_it():
    found = advise([2048] * 30, 2048, 16, price)
    assert found["saved_bytes"] == 0 and found["at_limit"] == 30 and "no advice" in found["text"]


@pytest.mark.parametrize("count", [0, 1, NEEDED_TURNS - 1])
def test_few_turns_are_said_to_be_few(count):
    found = advise([100] * count, 2048, 16, price)
    assert found["recommended"] is None and found["saved_bytes"] is None and found["cdf"] == []
    assert found["text"].startswith(f"{count} of {NEEDED_TURNS} turns")
    assert advise([100] * NEEDED_TURNS, 2048, 16, price)["recommended"] == 112
