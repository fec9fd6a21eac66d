"""Loops whose cause is known.

A cause is the one factor that makes the difference: most replies made with it loop, and none made the same way but with
this factor put right: whole ones from the prompt on, with the reply's own seed (so that chance can't be the difference)
and with those of the check. The factors:

- sampler: temperature 0 or 0.2; put right by a sane sampler.
- precision: an int4 cache of outlier keys (one pair of channels is `OUTLIER` times as large, which queries divide out
  again); put right by an fp16 cache. The default model loops readily with that too, so few cases are the format's
  alone, and the row may stay empty, which says nothing about the verdict.
- cache: keys and values of the prompt that were shifted or overwritten; put right by a sound cache. One looping reply
  is enough there, as the damage is known.
- model: what is left. All of the above are right, and all replies loop; where only most of them do with a sane sampler,
  model and sampler have both their share.
- none: a reply that does not loop.

How far this is independent of what it tests: labels come from whole replies by ordinary decoding. The diagnosis sees
one reply only, knows neither the factor nor the check's seeds, and is given no audit. For the cache it looks at
something else altogether: numbers measured live beside those of a fresh prefill. For precision, sampler and model both
change the same factor, as that is what these words mean: there the benchmark tells whether a few draws from one reply
say what many whole replies do, not whether the notion of a cause is a good one.

A cause is tried on a few questions at once, on all of them in a round, with other seeds in each of `ROUNDS`, until
there are enough.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.repetitions.bench import Bench, Reply
from benchmarks.repetitions.prompts import ASKED, CHANTED, CHANTS
from engine.local import LocalEngine
from engine.protocol import ChatMessage
from engine.sampling.params import SamplingParams

OUTLIER = 6.0
"""More, and int4 leaves noise, which does not repeat itself."""
ROUNDS = 6
AT_ONCE = 4
"""Cases come early, should there be little time."""
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


def rounds(params: SamplingParams, first: SamplingParams | None = None) -> Iterator[tuple[range, list[SamplingParams]]]:
    """A few questions at a time, by their place, and settings for each with a seed of its own; `first` those of the
    first round."""
    count = len(ASKED)
    for number in range(ROUNDS):
        for start in range(0, count, AT_ONCE):
            places = range(start, min(start + AT_ONCE, count))
            chosen = params if number or first is None else first
            yield places, [replace(chosen, seed=number * count + place) for place in places]


def model_cases(bench: Bench) -> Iterator[Reply]:
    """A reply that is a chant already goes on as one."""
    prompts = [
        bench.prompt(
            ChatMessage("user", f"Write this line again and again: {chant}"),
            ChatMessage("assistant", "\n".join([chant] * CHANTED) + "\n"),
        )
        for chant in CHANTS
    ]
    for places, settings in rounds(SANE, GREEDY):
        found = looping(bench.replies([prompts[place] for place in places], settings))
        sane = bench.loops(found, SANE)
        yield from (reply for reply, (loops, runs) in zip(found, sane, strict=True) if loops == runs)


def answers(bench: Bench, params: SamplingParams, first: SamplingParams | None = None) -> Iterator[list[Reply]]:
    for places, settings in rounds(params, first):
        yield bench.replies([bench.prompt(ChatMessage("user", ASKED[place])) for place in places], settings)


def sampler_cases(bench: Bench) -> Iterator[Reply]:
    for replies in answers(bench, COLD, GREEDY):
        yield from made_by(bench.loops, lambda found: bench.loops(found, SANE), replies)


def none_cases(bench: Bench) -> Iterator[Reply]:
    for replies in answers(bench, SANE):
        yield from (reply for reply in replies if reply.loop is None)


def precision_cases(coarse: Bench, fine: Bench) -> Iterator[Reply]:
    for replies in answers(coarse, PLAIN):
        yield from made_by(coarse.loops, fine.loops, replies)


def cache_cases(bench: Bench) -> Iterator[Reply]:
    """Each chat has a system prompt of its own, so that no other shares the blocks that are damaged."""
    for places, settings in rounds(PLAIN):
        session_ids = [str(uuid.uuid4()) for _ in places]
        chats = [
            [ChatMessage("system", f"{params.seed} is your name."), ChatMessage("user", ASKED[place])]
            for place, params in zip(places, settings, strict=True)
        ]
        first = bench.replies([bench.prompt(*chat) for chat in chats], settings, session_ids)
        for chat, reply in zip(chats, first, strict=True):
            chat += [ChatMessage("assistant", reply.text, reply.query.reply_ids), ChatMessage("user", "Go on.")]
        prompts = [bench.prompt(*chat) for chat in chats]
        sound = bench.checked(prompts, settings)
        for index, session_id in enumerate(session_ids):
            damage(bench.engine, session_id, shift=index % 2 == 1)
        replies = bench.replies(prompts, settings, session_ids)
        yield from (reply for reply, (others, _) in zip(replies, sound, strict=True) if reply.loop and not others)
        for session_id in session_ids:
            bench.engine.release(session_id)


def damage(engine: LocalEngine, session_id: str, shift: bool) -> None:
    """Move all rows of each full block by one, or overwrite them with its first: in every layer, keys and values."""

    def change() -> None:
        sequence, cache = engine._steps().scheduler.find(session_id), engine._need_parts().cache
        assert sequence is not None
        full = sequence.block_table[: sequence.cache_pos // sequence.block_size]
        tensors = cache.export_blocks(full)
        data = tensors["data"]
        tensors["data"] = data.roll(1, 3) if shift else data[:, :, :, :1].expand_as(data).clone()
        cache.import_blocks(full, tensors)

    engine._call(change)


def with_outlier_keys(engine: LocalEngine) -> None:
    """Stored keys are K / balance and queries Q * balance: a small constant makes keys large and changes no score."""
    cache = engine._need_parts().cache
    spec = cache.spec
    balance = torch.ones(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    balance[..., [3, 3 + spec.head_dim // 2]] = 1 / OUTLIER
    cache.balance = balance
