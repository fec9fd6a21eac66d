"""Loops whose cause is known.

A cause is the one factor that makes the difference: replies made with it loop, and none made the same way but with this
factor put right: whole ones from the prompt on, with the reply's own seed (so that chance can't be the difference) and
with those of the check. The factors:

- sampler: temperature 0 or 0.2; put right by a sane sampler. Most replies made with the factor loop.
- precision: an int4 cache of outlier keys (`damage`); put right by a float32 cache. Most replies loop in int4.
- cache: damaged keys of the prompt (`damage`); put right by a fresh prefill. One looping reply is enough there, as the
  damage is known.
- model: a model that knows a sentence by heart (`damage`); put right by the default model with a sane sampler, which
  hardly ever loops. All replies loop with a sane sampler; where only most do, model and sampler have both their share.
- none: a reply that does not loop.

How far this is independent of what it tests: labels come from whole replies by ordinary decoding, and every reply that
meets its label is a case. The diagnosis sees one reply only, knows neither the factor nor the check's seeds, and is
given no audit. For the cache it looks at something else altogether: numbers measured live beside those of a fresh
prefill. For precision, sampler and model both change the same factor, as that is what these words mean: there the
benchmark tells whether a few draws from one reply say what many whole replies do, not whether the notion of a cause is
a good one.

A cause is tried on a few questions at once, on all of them in a round, with other seeds in each of `ROUNDS`, until
there are enough; `tried` counts the replies that it took.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from benchmarks.repetitions.bench import Bench, Reply
from benchmarks.repetitions.damage import KINDS, damage, with_sentence_by_heart
from benchmarks.repetitions.prompts import ASKED, BY_HEART
from engine.protocol import ChatMessage
from engine.sampling.params import SamplingParams

ROUNDS = 12
AT_ONCE = 8
A_SENTENCE = 2
"""So many questions to a model that knows one sentence by heart; the next ones to one that knows another."""
SANE = SamplingParams(temperature=0.7, top_p=0.95, repetition_penalty=1.1)
PLAIN = SamplingParams(temperature=0.5, top_p=0.95)
COLD = SamplingParams(temperature=0.2)
GREEDY = SamplingParams(temperature=0)


def looping(replies: Sequence[Reply]) -> list[Reply]:
    return [reply for reply in replies if reply.loop is not None]


def most(runs: tuple[int, int]) -> bool:
    return 2 * runs[0] > runs[1]


def made_by(
    factor: Callable[[list[Reply]], list[tuple[int, int]]],
    without: Callable[[list[Reply]], list[tuple[int, int]]],
    replies: Sequence[Reply],
) -> Iterator[Reply]:
    """The replies that loop, as most do with the factor and none without it."""
    found = looping(replies)
    found = [reply for reply, (loops, _) in zip(found, without(found), strict=True) if not loops]
    return (reply for reply, runs in zip(found, factor(found), strict=True) if most(runs))


def rounds(
    count: int, params: SamplingParams, first: SamplingParams | None = None, at_once: int = AT_ONCE
) -> Iterator[tuple[range, list[SamplingParams]]]:
    """A few of `count` questions at a time, by their place, and settings for each with a seed of its own; `first` those
    of the first round."""
    for number in range(ROUNDS):
        for start in range(0, count, at_once):
            places = range(start, min(start + at_once, count))
            chosen = params if number or first is None else first
            yield places, [replace(chosen, seed=number * count + place) for place in places]


def answers(
    bench: Bench,
    tried: Counter[str],
    cause: str,
    params: SamplingParams,
    first: SamplingParams | None = None,
    at_once: int = AT_ONCE,
) -> Iterator[list[Reply]]:
    for places, settings in rounds(len(ASKED), params, first, at_once):
        tried[cause] += len(places)
        yield bench.replies([bench.prompt(ChatMessage("user", ASKED[place])) for place in places], settings)


def none_cases(bench: Bench, tried: Counter[str]) -> Iterator[Reply]:
    for replies in answers(bench, tried, "none", SANE):
        yield from (reply for reply in replies if reply.loop is None)


def model_cases(stubborn: Bench, fine: Bench, tried: Counter[str]) -> Iterator[Reply]:
    sentences = cycle(BY_HEART)
    with_sentence_by_heart(stubborn.engine, next(sentences))
    for replies in answers(stubborn, tried, "model", SANE, GREEDY, A_SENTENCE):
        found = looping(replies)
        sane = stubborn.loops(found, SANE)
        found = [reply for reply, (loops, runs) in zip(found, sane, strict=True) if loops == runs]
        yield from (reply for reply, (loops, _) in zip(found, fine.loops(found, SANE), strict=True) if not loops)
        with_sentence_by_heart(stubborn.engine, next(sentences))


def sampler_cases(bench: Bench, tried: Counter[str]) -> Iterator[Reply]:
    for replies in answers(bench, tried, "sampler", COLD, GREEDY):
        yield from made_by(bench.loops, lambda found: bench.loops(found, SANE), replies)


def precision_cases(coarse: Bench, fine: Bench, tried: Counter[str]) -> Iterator[Reply]:
    exact = replace(PLAIN, kv_format="fp32")
    for replies in answers(coarse, tried, "precision", PLAIN):
        yield from made_by(coarse.loops, lambda found: fine.loops(found, exact), replies)


def cache_cases(bench: Bench, tried: Counter[str]) -> Iterator[Reply]:
    """Keys are damaged behind the prompt, and the reply is made again."""
    for places, settings in rounds(len(ASKED), PLAIN):
        tried["cache"] += len(places)
        session_ids = [str(uuid.uuid4()) for _ in places]
        prompts = [bench.prompt(ChatMessage("user", ASKED[place])) for place in places]
        bench.replies(prompts, settings, session_ids, tokens=1)
        for index, session_id in enumerate(session_ids):
            damage(bench.engine, session_id, KINDS[index % len(KINDS)])
        found = looping(bench.replies(prompts, settings, session_ids))
        for session_id in session_ids:
            bench.engine.release(session_id)
        yield from (reply for reply, (loops, _) in zip(found, bench.loops(found), strict=True) if not loops)
