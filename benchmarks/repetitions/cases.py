"""Loops whose cause is known.

A cause is the one factor that makes the difference: most replies made with it loop, and none made the same way but with
this factor put right: whole ones from the prompt on, with the reply's own seed (so that chance can't be the difference)
and with those of the check. The factors:

- sampler: temperature 0 or 0.2; put right by a sane sampler.
- precision: an int4 cache of outlier keys (one pair of channels is `OUTLIER` times as large, which queries divide out
  again); put right by an fp16 cache.
- cache: keys and values of the prompt that were shifted or overwritten; put right by a sound cache. One looping reply
  is enough there, as the damage is known.
- model: what is left. All of the above are right, and the reply loops, and so do most of the others.
- none: a reply that does not loop.

How far this is independent of what it tests: labels come from whole replies by ordinary decoding. The diagnosis sees
one reply only, knows neither the factor nor the check's seeds, and is given no audit. For the cache it looks at
something else altogether: numbers measured live beside those of a fresh prefill. For precision, sampler and model both
change the same factor, as that is what these words mean: there the benchmark tells whether a few draws from one reply
say what many whole replies do, not whether the notion of a cause is a good one.

A cause is tried on all questions at once, with other seeds each time, until there are enough or `ROUNDS` were tried.
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


def seeded(params: Sequence[SamplingParams], number: int) -> list[SamplingParams]:
    """Settings for each question in round `number`, in turn those of `params`."""
    return [
        replace(params[(index + number) % len(params)], seed=number * len(ASKED) + index) for index in range(len(ASKED))
    ]


def model_cases(bench: Bench) -> Iterator[Reply]:
    """A reply that is a chant already goes on as one."""
    prompts = [
        bench.prompt(
            ChatMessage("user", f"Write this line again and again: {chant}"),
            ChatMessage("assistant", "\n".join([chant] * CHANTED) + "\n"),
        )
        for chant in CHANTS
    ]
    for number in range(ROUNDS):
        replies = bench.replies(prompts, seeded((SANE, GREEDY) if not number else (SANE,), number))
        found = looping(replies)
        yield from (reply for reply, runs in zip(found, bench.loops(found, SANE), strict=True) if most(runs))


def questions(bench: Bench) -> list[tuple[int, ...]]:
    return [bench.prompt(ChatMessage("user", question)) for question in ASKED]


def sampler_cases(bench: Bench) -> Iterator[Reply]:
    prompts = questions(bench)
    for number in range(ROUNDS):
        replies = bench.replies(prompts, seeded((COLD if number else GREEDY,), number))
        yield from made_by(bench.loops, lambda found: bench.loops(found, SANE), replies)


def none_cases(bench: Bench) -> Iterator[Reply]:
    prompts = questions(bench)
    for number in range(ROUNDS):
        yield from (reply for reply in bench.replies(prompts, seeded((SANE,), number)) if reply.loop is None)


def precision_cases(coarse: Bench, fine: Bench) -> Iterator[Reply]:
    prompts = questions(coarse)
    for number in range(ROUNDS):
        replies = coarse.replies(prompts, seeded((PLAIN,), number))
        yield from made_by(coarse.loops, fine.loops, replies)


def cache_cases(bench: Bench) -> Iterator[Reply]:
    """Each chat has a system prompt of its own, so that no other shares the blocks that are damaged."""
    for number in range(ROUNDS):
        session_ids, settings = [str(uuid.uuid4()) for _ in ASKED], seeded((PLAIN,), number)
        chats = [
            [ChatMessage("system", f"{number * len(ASKED) + index} is your name."), ChatMessage("user", question)]
            for index, question in enumerate(ASKED)
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
