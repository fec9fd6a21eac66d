"""Loops of the default model whose cause is known, and how often the diagnosis names it.

    python -m benchmarks.repetitions [--cases 5] [--tokens 200]

Each cause is made on purpose, and counts as made only after a check that does not use the diagnosis:

- model: the reply loops, and so do most of three replies with a sane sampler and other seeds.
- sampler: it loops at temperature 0, and none of three replies with a sane sampler does.
- precision: it loops with an int4 cache of outlier keys (one pair of channels is `OUTLIER` times as large, which
  queries divide out again), and none of three replies with an fp16 cache and other seeds does.
- cache: it loops after keys and values of the prompt were shifted or overwritten, and none of three replies on a sound
  cache does.
- none: a reply that does not loop.
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
from engine.debugging.verdict import VERDICTS
from engine.local import LocalEngine
from engine.protocol import ChatMessage, DiagnoseQuery, Event, Finished, GenerateRequest, TokenDelta
from engine.sampling.params import SamplingParams

OUTLIER = 40.0
SEEDS = (101, 202, 303)
SANE = SamplingParams(temperature=0.7, top_p=0.95, repetition_penalty=1.1)
PLAIN = SamplingParams(temperature=0.7, top_p=0.95)
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
    "go team go",
    "the wheels on the bus go round and round",
    "we want more",
    "tick tock",
    "one two one two",
    "rain rain go away",
    "hip hip hooray",
    "left right left right",
    "over and over again",
    "bring it back",
    "this is the end",
    "row row row your boat",
)


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

    def prompt(self, *messages: ChatMessage) -> tuple[int, ...]:
        return self.engine.tokenizer.render(messages, datetime(2026, 1, 1, tzinfo=UTC)).token_ids

    def reply(self, prompt: tuple[int, ...], params: SamplingParams, session_id: str | None = None) -> Reply:
        return self.replies([prompt], [params], session_id)[0]

    def replies(
        self, prompts: Sequence[tuple[int, ...]], settings: Sequence[SamplingParams], session_id: str | None = None
    ) -> list[Reply]:
        """One reply per prompt and settings, all at the same time."""
        requests = [
            GenerateRequest(prompt, replace(params, max_tokens=self.tokens), session_id)
            for prompt, params in zip(prompts, settings, strict=True)
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

    def looping(self, prompt: tuple[int, ...], params: SamplingParams) -> int:
        """How many of the replies with the seeds of the check loop."""
        settings = [replace(params, seed=seed) for seed in SEEDS]
        return sum(reply.loop is not None for reply in self.replies([prompt] * len(SEEDS), settings))


def model_cases(bench: Bench) -> Iterator[Reply]:
    """A chat that is a chant already goes on as one."""
    for index, chant in enumerate(CHANTS):
        said = "\n".join([chant] * 30)
        question = ChatMessage("user", f"Chant for me: {chant}")
        answer = ChatMessage("assistant", said)
        prompt = bench.prompt(question, answer, ChatMessage("user", "Go on, the same again, many times."))
        reply = bench.reply(prompt, GREEDY if index % 2 else replace(SANE, seed=index))
        if reply.loop is not None and 2 * bench.looping(prompt, SANE) > len(SEEDS):
            yield reply


def sampler_cases(bench: Bench) -> Iterator[Reply]:
    for question in ASKED:
        prompt = bench.prompt(ChatMessage("user", question))
        reply = bench.reply(prompt, GREEDY)
        if reply.loop is not None and not bench.looping(prompt, SANE):
            yield reply


def none_cases(bench: Bench) -> Iterator[Reply]:
    for index, question in enumerate(ASKED):
        reply = bench.reply(bench.prompt(ChatMessage("user", question)), replace(SANE, seed=index))
        if reply.loop is None:
            yield reply


def precision_cases(coarse: Bench, fine: Bench) -> Iterator[Reply]:
    for index, question in enumerate(ASKED):
        prompt = coarse.prompt(ChatMessage("user", question))
        params = replace((PLAIN, SANE)[index % 2], seed=index)
        reply = coarse.reply(prompt, params)
        if reply.loop is not None and not fine.looping(prompt, params):
            yield reply


def cache_cases(bench: Bench) -> Iterator[Reply]:
    """Each chat has a system prompt of its own, so that no other shares the blocks that are damaged."""
    for index, question in enumerate(ASKED):
        session_id = str(uuid.uuid4())
        chat = [ChatMessage("system", f"Number {index} is your name."), ChatMessage("user", question)]
        params = replace(PLAIN, seed=index)
        first = bench.reply(bench.prompt(*chat), params, session_id)
        chat += [ChatMessage("assistant", first.text, first.query.reply_ids), ChatMessage("user", "Go on.")]
        prompt = bench.prompt(*chat)
        if not bench.looping(prompt, params):
            damage(bench.engine, session_id, shift=index % 2 == 1)
            reply = bench.reply(prompt, params, session_id)
            if reply.loop is not None:
                yield reply
        bench.engine.release(session_id)


def damage(engine: LocalEngine, session_id: str, shift: bool) -> None:
    """Move all rows of each block by one, or overwrite them with its first: in every layer, keys and values."""

    def change() -> None:
        sequence, cache = engine._steps().scheduler.find(session_id), engine._need_parts().cache
        assert sequence is not None
        tensors = cache.export_blocks(sequence.block_table)
        data = tensors["data"]
        tensors["data"] = data.roll(1, 3) if shift else data[:, :, :, :1].expand_as(data).clone()
        cache.import_blocks(sequence.block_table, tensors)

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
    parser.add_argument("--cases", type=int, default=5, help="cases per cause, at most 12")
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
