"""Loops of the default model whose cause is known, and how often the diagnosis names it.

    python -m benchmarks.repetitions [--cases 5] [--tokens 200]

Each cause is made on purpose, and counts as made only after a check that does not use the diagnosis:

- model: the reply loops, and so do most of three replies with a sane sampler and other seeds.
- sampler: it loops at temperature 0 or 0.2, and none of three replies with a sane sampler does.
- precision: it loops with an int4 cache of outlier keys (one pair of channels is `OUTLIER` times as large, which
  queries divide out again), and none of four replies with an fp16 cache does, with the same seed and others.
- cache: it loops after keys and values of the prompt were shifted or overwritten, and none of four replies on a sound
  cache does, with the same seed and others.
- none: a reply that does not loop.

A cause is tried on all questions at once, with other seeds each time, until there are `--cases` or `ROUNDS` were tried.
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from app import default_data_dir
from benchmarks.common import print_json, print_table, until
from engine.config import EngineConfig
from engine.debugging.loops import Loop, find_loop, word_test
from engine.debugging.protocol import DiagnoseQuery
from engine.debugging.verdict import VERDICTS
from engine.local import LocalEngine
from engine.protocol import ChatMessage, Event, Finished, GenerateRequest, TokenDelta
from engine.sampling.params import SamplingParams

OUTLIER = 6.0
"""More, and int4 leaves noise, which does not repeat itself."""
ROUNDS = 6
SEEDS = (101, 202, 303)
SANE = SamplingParams(temperature=0.7, top_p=0.95, repetition_penalty=1.1)
PLAIN = SamplingParams(temperature=0.5, top_p=0.95)
COLD = SamplingParams(temperature=0.2)
GREEDY = SamplingParams(temperature=0)
ASKED = (
    "Write a poem about rain.",
    "Write a song with a chorus.",
    "Tell me a very long story about a dragon.",
    "Write a dialogue between a cat and a dog.",
    "List 50 synonyms of good.",
    "Give me twenty tips to sleep better.",
    "Write a long list of things to do in Paris.",
    "What are the advantages of solar energy? List thirty.",
    "Tell me something about the sea.",
    "Say na na na na forever.",
    "Write unit tests for an add function.",
    "Describe every planet.",
)
CHANTS = (
    "The quick brown fox jumps over the lazy dog.",
    "All work and no play makes Jack a dull boy.",
    "Happy birthday to you, happy birthday to you.",
    "Peter Piper picked a peck of pickled peppers.",
    "She sells sea shells by the sea shore.",
    "Humpty Dumpty sat on a wall, Humpty Dumpty had a great fall.",
    "I will not talk in class again.",
    "London Bridge is falling down, falling down, falling down.",
    "Twinkle, twinkle, little star, how I wonder what you are.",
    "The wheels on the bus go round and round.",
    "How much wood would a woodchuck chuck?",
    "Fuzzy Wuzzy was a bear, Fuzzy Wuzzy had no hair.",
)
CHANTED = 80
"""Lines of a chant that are there already: enough that a penalty does not end it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply of the engine; `loop` is found in its ids as they were sampled."""

    query: DiagnoseQuery
    text: str
    loop: Loop | None


class Bench:
    """An engine and the questions that are asked of it; `tokens` is the length of every reply."""

    def __init__(self, options: argparse.Namespace, kv_format: str) -> None:
        folder = options.data_dir
        self.tokens = options.tokens
        self.engine = LocalEngine(
            EngineConfig(folder, options.model, kv_format=kv_format, max_seq_len=2048, snapshot_limit=0)
        )
        self.engine.start()
        self.engine.wait_ready(600)
        self.is_word = word_test(self.engine.tokenizer.shown_bytes)
        self._looping: dict[tuple[tuple[int, ...], str], int] = {}

    def prompt(self, *messages: ChatMessage) -> tuple[int, ...]:
        """An assistant's message at the end is continued."""
        open_end = messages[-1].role == "assistant"
        date = datetime(2026, 1, 1, tzinfo=UTC)
        return self.engine.tokenizer.render(messages, date, not open_end, open_end).token_ids

    def replies(
        self,
        prompts: Sequence[tuple[int, ...]],
        settings: Sequence[SamplingParams],
        session_ids: Sequence[str | None] | None = None,
    ) -> list[Reply]:
        """One reply per prompt and settings, all at the same time."""
        requests = [
            GenerateRequest(prompt, replace(params, max_tokens=self.tokens), session_id)
            for prompt, params, session_id in zip(prompts, settings, session_ids or [None] * len(prompts), strict=True)
        ]
        streams = [self.engine.generate(request) for request in requests]
        events: list[list[Event]] = [[] for _ in streams]
        readers = [
            threading.Thread(target=events[index].extend, args=(stream,)) for index, stream in enumerate(streams)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return [self._read(request, found) for request, found in zip(requests, events, strict=True)]

    def _read(self, request: GenerateRequest, events: Sequence[Event]) -> Reply:
        last = events[-1]
        if not isinstance(last, Finished):
            raise SystemExit("the engine failed")
        deltas = [event for event in events if isinstance(event, TokenDelta)]
        ids = tuple(token_id for event in deltas for token_id in event.token_ids)
        measures = tuple(item for event in deltas for item in event.measures)
        params = replace(request.params, seed=last.stats.seed, max_tokens=None)
        session_id = request.session_id or str(uuid.uuid4())
        query = DiagnoseQuery(session_id, request.prompt_ids, ids, params, measures)
        return Reply(query, last.text, find_loop(ids, self.is_word))

    def loops_left(self, replies: Sequence[Reply], params: SamplingParams | None = None) -> list[tuple[Reply, int]]:
        """The replies that loop, and how many with the seeds of the check do here, by the same settings or by these."""
        looping = [reply for reply in replies if reply.loop is not None]
        settings = [params or reply.query.params for reply in looping]
        return list(zip(looping, self.checked([reply.query.prompt_ids for reply in looping], settings), strict=True))

    def checked(self, prompts: Sequence[tuple[int, ...]], settings: Sequence[SamplingParams]) -> list[int]:
        """Of each prompt, how many replies loop: with the seeds of the check, and with that of the settings."""
        keys = [(prompt, repr(params)) for prompt, params in zip(prompts, settings, strict=True)]
        new = {key: (prompt, params) for key, prompt, params in zip(keys, prompts, settings, strict=True)
               if key not in self._looping}  # fmt: skip
        runs = [
            (key, prompt, replace(params, seed=seed))
            for key, (prompt, params) in new.items()
            for seed in (*SEEDS, *([] if params.seed is None else [params.seed]))
        ]
        self._looping.update(dict.fromkeys(new, 0))
        replies = self.replies([run[1] for run in runs], [run[2] for run in runs])
        for (key, _, _), reply in zip(runs, replies, strict=True):
            self._looping[key] += reply.loop is not None
        return [self._looping[key] for key in keys]


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
        yield from (reply for reply, loops in bench.loops_left(replies, SANE) if 2 * loops > len(SEEDS))


def questions(bench: Bench) -> list[tuple[int, ...]]:
    return [bench.prompt(ChatMessage("user", question)) for question in ASKED]


def sampler_cases(bench: Bench) -> Iterator[Reply]:
    prompts = questions(bench)
    for number in range(ROUNDS):
        replies = bench.replies(prompts, seeded((COLD if number else GREEDY,), number))
        yield from (reply for reply, loops in bench.loops_left(replies, SANE) if not loops)


def none_cases(bench: Bench) -> Iterator[Reply]:
    prompts = questions(bench)
    for number in range(ROUNDS):
        yield from (reply for reply in bench.replies(prompts, seeded((SANE,), number)) if reply.loop is None)


def precision_cases(coarse: Bench, fine: Bench) -> Iterator[Reply]:
    prompts = questions(coarse)
    for number in range(ROUNDS):
        replies = coarse.replies(prompts, seeded((PLAIN,), number))
        yield from (reply for reply, loops in fine.loops_left(replies) if not loops)


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
        loops = bench.checked(prompts, settings)
        for index, session_id in enumerate(session_ids):
            damage(bench.engine, session_id, shift=index % 2 == 1)
        replies = bench.replies(prompts, settings, session_ids)
        yield from (reply for reply, others in zip(replies, loops, strict=True) if reply.loop and not others)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="as for app.py; default: the default model")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir())
    parser.add_argument("--cases", type=int, default=5, help="cases per cause")
    parser.add_argument("--cause", choices=VERDICTS, action="append", help="only this one; may be given again")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per reply")
    parser.add_argument("--limit-s", type=float, help="stop after so many seconds, and tell what was run by then")
    options = parser.parse_args()
    fine, coarse = Bench(options, "fp16"), Bench(options, "int4")
    with_outlier_keys(coarse.engine)
    made = {
        "none": (fine, none_cases(fine)),
        "sampler": (fine, sampler_cases(fine)),
        "precision": (coarse, precision_cases(coarse, fine)),
        "cache": (fine, cache_cases(fine)),
        "model": (fine, model_cases(fine)),
    }
    made = {cause: cases for cause, cases in made.items() if cause in (options.cause or VERDICTS)}
    found: Counter[tuple[str, str]] = Counter()
    seconds: list[float] = []
    for cause, verdict, took in until(judged(made, options.cases), options.limit_s):
        found[cause, verdict] += 1
        seconds.append(took)
    report(found, seconds)
    fine.engine.close()
    coarse.engine.close()


def judged(made: dict[str, tuple[Bench, Iterator[Reply]]], count: int) -> Iterator[tuple[str, str, float]]:
    """Cause, verdict and the diagnosis' seconds of each case. Causes take turns, so that wherever this ends each has
    been tried as often as the others, as far as it could be made."""
    left = {cause: (bench, islice(replies, count)) for cause, (bench, replies) in made.items()}
    while left:
        for cause, (bench, replies) in list(left.items()):
            reply = next(replies, None)
            if reply is None:
                del left[cause]
                continue
            began = time.perf_counter()
            result = bench.engine.diagnose(reply.query)
            took = time.perf_counter() - began
            show(cause, reply, result)
            yield cause, result["verdict"], took


def show(cause: str, reply: Reply, result: dict[str, Any]) -> None:
    runs = [f"{item['run']} {item['looped']}/{item['runs']}" for item in result["evidence"] if "runs" in item]
    drift = next((item["first"] for item in result["evidence"] if item["run"] == "measures"), None)
    print(f"{cause:>9} -> {result['verdict']:<9} {reply.loop} drift from {drift}; {', '.join(runs)}", flush=True)
    if result["verdict"] != cause:
        for item in result["evidence"]:
            print(f"{'':>12} {item['run']}: {item['sentence']}", flush=True)


def report(found: Counter[tuple[str, str]], seconds: Sequence[float]) -> None:
    rows = [[cause, *(found[cause, verdict] for verdict in VERDICTS)] for cause in VERDICTS]
    print_table(["made by \\ verdict", *VERDICTS], rows)
    total, right = sum(found.values()), sum(found[cause, cause] for cause in VERDICTS)
    share = right / total if total else None
    result = {"cases": total, "right": right, "share": share, "longest_s": round(max(seconds, default=0.0), 1)}
    print_json("repetitions", {**result, "confusion": {f"{a}->{b}": n for (a, b), n in sorted(found.items())}})


if __name__ == "__main__":
    main()
