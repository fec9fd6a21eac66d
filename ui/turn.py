"""A running reply as the app sees it. Pages and clients look at it; none of them owns it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from engine.debugging.protocol import TokenMeasure
from engine.errors import KVScopeError
from engine.kv_cache.prefixes import common_prefix_len
from engine.protocol import Event, EventStream, Failed, Finished, TokenDelta, TurnStats


@dataclass(frozen=True, slots=True)
class TurnView:
    """A consistent look at a turn. `version` grows with every event."""

    text: str
    token_ids: tuple[int, ...]
    token_count: int
    stats: TurnStats | None
    done: bool
    error: KVScopeError | None
    finish_reason: str | None
    version: int


class Turn:
    """Collects the events of one reply and wakes whoever waits for more. Safe from any thread."""

    def __init__(
        self,
        turn_id: str,
        session_id: str,
        user_message_id: str | None,
        message_id: str,
        dropped: tuple[str, ...],
        max_new_tokens: int,
    ) -> None:
        self.id = turn_id
        self.session_id = session_id
        self.user_message_id = user_message_id
        self.message_id = message_id
        self.dropped = dropped
        self.max_new_tokens = max_new_tokens
        self._stream: EventStream | None = None
        self._events: list[Event] = []
        self._last: Failed | Finished | None = None
        self._text: list[str] = []
        self._ids: list[int] = []
        self._measures: list[TokenMeasure] = []
        self._stats: TurnStats | None = None
        self._finished: Finished | None = None
        self._error: KVScopeError | None = None
        self._done = False
        self._cancelled = False
        self._version = 0
        self._changed = threading.Condition()
        self._followers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def attach(self, stream: EventStream) -> None:
        with self._changed:
            self._stream = stream
            cancelled = self._cancelled
        if cancelled:
            stream.cancel()

    def cancel(self) -> None:
        """Ask the engine to end the reply, as soon as it has it; what was generated so far is kept."""
        with self._changed:
            self._cancelled = True
            stream = self._stream
        if stream is not None:
            stream.cancel()

    def add(self, event: Event) -> None:
        """Take one engine event. The last one does not yet make the turn done: it has to be stored first.

        Until then it is not among `events` either: who sees the end of a reply finds it in the store.
        """
        with self._changed:
            if isinstance(event, Failed | Finished):
                self._last = event
            else:
                self._events.append(event)
            if isinstance(event, Failed):
                self._error = event.error
            elif isinstance(event, Finished):
                self._finished = event
            elif isinstance(event, TokenDelta):
                self._text.append(event.text)
                self._ids.extend(event.token_ids)
                self._measures.extend(event.measures)
            self._stats = event.stats or self._stats
            self._notify()

    def close(self, error: KVScopeError | None = None) -> None:
        """The reply is stored, or `error` says why it could not be."""
        with self._changed:
            self._error = self._error or error
            self._done = True
            if self._last is not None:
                self._events.append(self._last)
            self._notify()

    def measures(self, token_ids: Sequence[int]) -> list[TokenMeasure]:
        """Those of the reply's first tokens, as far as what was sampled is what stands in its history (`token_ids`)."""
        with self._changed:
            if len(self._measures) != len(self._ids):
                return []
            return self._measures[: common_prefix_len(self._ids, token_ids)]

    def view(self) -> TurnView:
        with self._changed:
            return self._view()

    def wait(self, version: int, timeout_s: float) -> TurnView:
        """Block until there is something newer than `version`, the turn is done, or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version or self._done, timeout_s)
            return self._view()

    async def events(self, start: int = 0) -> AsyncIterator[Event]:
        """Every event from index `start` on, live; ends once the reply is stored."""
        wake = asyncio.Event()
        follower = (asyncio.get_running_loop(), wake)
        with self._changed:
            self._followers.add(follower)
        try:
            while True:
                with self._changed:
                    wake.clear()
                    fresh, done = self._events[start:], self._done
                for event in fresh:
                    yield event
                start += len(fresh)
                if done:
                    return
                if not fresh:
                    await wake.wait()
        finally:
            with self._changed:
                self._followers.discard(follower)

    def _view(self) -> TurnView:
        text = self._finished.text if self._finished else "".join(self._text)
        ids = self._finished.token_ids if self._finished else tuple(self._ids)
        return TurnView(
            text=text,
            token_ids=ids,
            token_count=self._stats.generated_tokens if self._stats else 0,
            stats=self._stats,
            done=self._done,
            error=self._error,
            finish_reason=self._stats.finish_reason if self._stats else None,
            version=self._version,
        )

    def _notify(self) -> None:
        self._version += 1
        self._changed.notify_all()
        for loop, wake in self._followers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake.set)
