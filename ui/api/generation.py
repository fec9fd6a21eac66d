"""Replies as async streams of engine events: stateless ones read by a thread each, those of a session from its turn."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from engine.errors import KVScopeError
from engine.protocol import (
    ChatEngine,
    Event,
    EventStream,
    Failed,
    Finished,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
    TurnStats,
)
from engine.sampling.beam import BeamParams
from engine.sampling.params import MAX_SEED, SamplingParams
from ui.turn import Turn

Indexed = tuple[int, Event]
"""A choice's number and one of its events."""


@dataclass(slots=True)
class Reply:
    """What is known of one choice so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: TurnStats | None = None
    done: bool = False

    def add(self, event: Event) -> None:
        """Take an event. Raises the error of a reply that failed."""
        if isinstance(event, Failed):
            raise event.error
        self.stats = event.stats
        if isinstance(event, TokenDelta):
            self.text.append(event.text)
            self.logprobs += event.logprobs
        elif isinstance(event, Finished):
            self.text = [event.text]
            self.done = True

    @property
    def finish_reason(self) -> str:
        """In OpenAI's words, which know no reply that was stopped by hand."""
        return "length" if self.stats is not None and self.stats.finish_reason == "length" else "stop"


def seeded(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Settings of `count` choices: their seeds follow on each other from the given or a fresh one."""
    if count == 1:
        return [params]
    first = secrets.randbelow(2**31) if params.seed is None else params.seed
    return [replace(params, seed=(first + index) % (MAX_SEED + 1)) for index in range(count)]


async def stateless_events(
    engine: ChatEngine, prompt_ids: Sequence[int], choices: Sequence[SamplingParams], beams: BeamParams
) -> AsyncIterator[Indexed]:
    """Events of all choices as they come. Closing the iterator ends the replies that still run.

    The others start once the first one's prompt is in the cache, so that they share it.
    """
    queue: asyncio.Queue[Indexed] = asyncio.Queue()
    running: dict[int, EventStream] = {}

    def start(index: int) -> None:
        request = GenerateRequest(tuple(prompt_ids), choices[index], beams=beams)
        running[index] = engine.generate(request)
        _read_in_thread(running[index], index, queue)

    try:
        start(0)
        waiting = list(range(1, len(choices)))
        while running:
            index, event = await queue.get()
            if waiting and isinstance(event, TokenDelta | Finished):
                for other in waiting:
                    start(other)
                waiting = []
            if isinstance(event, Finished | Failed):
                running.pop(index)
            yield index, event
    finally:
        for stream in running.values():
            stream.cancel()


async def turn_events(turn: Turn) -> AsyncIterator[Indexed]:
    """Events of a session's turn; it is over once the reply is stored. Closing the iterator ends the turn."""
    try:
        async for event in turn.events():
            yield 0, event
        error = turn.view().error
        if error is not None:
            raise error
    finally:
        if not turn.view().done:
            turn.cancel()


async def with_first_event(events: AsyncIterator[Indexed]) -> AsyncIterator[Indexed]:
    """The same events, once the first is there: what is wrong with a request shows before the answer begins."""
    first = await anext(events)
    if isinstance(first[1], Failed):
        await events.aclose()  # type: ignore[attr-defined]
        raise first[1].error

    async def again() -> AsyncIterator[Indexed]:
        try:
            yield first
            async for item in events:
                yield item
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    return again()


async def finished_turn(turn: Turn) -> Reply:
    """The whole reply of a turn that nobody cancels here. Raises the turn's error."""
    reply = Reply()
    async for event in turn.events():
        reply.add(event)
    error: KVScopeError | None = turn.view().error
    if error is not None:
        raise error
    return reply


def _read_in_thread(stream: EventStream, index: int, queue: asyncio.Queue[Indexed]) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        for event in stream:
            # The loop may have ended before the reply: nobody is left to tell.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, (index, event))

    threading.Thread(target=read, name=f"kvscope-read-{stream.request_id[:8]}", daemon=True).start()
