"""An engine to make replies with, and how often they loop."""

from __future__ import annotations

import argparse
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from engine.config import EngineConfig
from engine.debugging.loops import Loop, find_loop, word_test
from engine.debugging.protocol import DiagnoseQuery
from engine.local import LocalEngine
from engine.protocol import ChatMessage, Event, Finished, GenerateRequest, TokenDelta
from engine.sampling.params import SamplingParams

SEEDS = (101, 202, 303)


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
        """An assistant's message at the end is continued."""
        open_end = messages[-1].role == "assistant"
        date = datetime(2026, 1, 1, tzinfo=UTC)
        return self.engine.tokenizer.render(messages, date, not open_end, open_end).token_ids

    def replies(
        self,
        prompts: Sequence[tuple[int, ...]],
        settings: Sequence[SamplingParams],
        session_ids: Sequence[str | None] | None = None,
        tokens: int | None = None,
    ) -> list[Reply]:
        """One reply per prompt and settings, all at the same time."""
        requests = [
            GenerateRequest(prompt, replace(params, max_tokens=tokens or self.tokens), session_id)
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

    def loops(
        self, replies: Sequence[Reply], params: SamplingParams | None = None, tokens: int | None = None
    ) -> list[tuple[int, int]]:
        """Of each reply, `(loops, runs)` when it is made here with its own and the check's seeds, by its own settings
        or by these."""
        queries = [reply.query for reply in replies]
        settings = [replace(params or query.params, seed=query.params.seed) for query in queries]
        # One run is enough where nothing is drawn.
        runs = [
            (index, query.prompt_ids, replace(params, seed=seed))
            for index, (query, params) in enumerate(zip(queries, settings, strict=True))
            for seed in ((params.seed, *SEEDS) if params.temperature > 0 else (params.seed,))
        ]
        looped, made = [0] * len(replies), [0] * len(replies)
        again = self.replies([run[1] for run in runs], [run[2] for run in runs], tokens=tokens)
        for (index, _, _), reply in zip(runs, again, strict=True):
            looped[index] += reply.loop is not None
            made[index] += 1
        return list(zip(looped, made, strict=True))
