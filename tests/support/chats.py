"""A whole chat app without its server: real store, real engine over a tiny model, the conversation service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import Event, Finished, GenerateRequest, TokenDelta
from engine.sampling.params import SamplingParams
from sessions.store import SessionStore
from tests.support.engines import RecordingEngine, run, tiny_engine
from ui.chat import ChatService
from ui.turn import Turn, TurnView

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, top_logprobs=5)
SCRIPTED = SamplingParams(temperature=0)


class TinyChat:
    """What `app.py` wires, over the database in `folder`; opening the same folder again is a restart."""

    def __init__(
        self, folder: Path, clock: Callable[[], datetime] | None = None, busy_timeout_s: float = 10.0, **engine: Any
    ) -> None:
        self._engine_options = {"block_size": BLOCK, **engine}
        options = {} if clock is None else {"clock": clock}
        self.store = SessionStore(folder / "chats.db", busy_timeout_s=busy_timeout_s, **options)
        self.engine: RecordingEngine = tiny_engine(**self._engine_options)
        self.service = ChatService(self.store, self.engine)

    def send(self, session_id: str, text: str, params: SamplingParams = GREEDY) -> TurnView:
        return finished(self.service.send(session_id, text, params))

    def say(self, session_id: str, text: str, reply: str | tuple[int, ...] = "Well.<|im_end|>") -> TurnView:
        """Send a message; the answer is scripted."""
        self.engine.script.append(self.ids(reply) if isinstance(reply, str) else reply)
        return self.send(session_id, text, SCRIPTED)

    def say_with_own_settings(self, session_id: str, text: str, reply: str) -> TurnView:
        """The same under the settings that the session has."""
        self.engine.script.append(self.ids(reply))
        return finished(self.service.send(session_id, text))

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(text))

    def prompt_text(self, index: int = -1) -> str:
        """The prompt of a request with its control tokens, as the model got it."""
        return "".join(self.engine.tokenizer.token_text(i) for i in self.engine.requests[index].prompt_ids)

    def assert_parity(self, turn: Turn, request: GenerateRequest | None = None) -> None:
        """The same ids and log probabilities as a brand-new engine gives for the same prompt."""
        request = request or self.engine.requests[-1]
        fresh_engine = tiny_engine(**self._engine_options)
        events = run(fresh_engine, replace(request, session_id=None))
        fresh_engine.close()
        fresh, view = events[-1], turn.view()
        assert isinstance(fresh, Finished) and fresh.stats.reused_tokens == 0
        assert (view.token_ids, view.text) == (fresh.token_ids, fresh.text)
        assert logprobs(turn._events) == pytest.approx(logprobs(events), abs=1e-3)

    def assert_cache_is_history(self, turn: Turn) -> None:
        """Ids in the cache = ids of the history, and positions, lengths and panel agree."""
        report = self.engine.inspect(turn.session_id)
        history = [*self.engine.requests[-1].prompt_ids, *turn.view().token_ids]
        assert report["token_ids"] == history[: report["cache_pos"]]
        if "\ufffd" not in turn.view().text:  # bytes that form no character leave the history as text
            assert report["cache_pos"] >= len(history) - 1
        assert all(report["invariants"].values()), report["invariants"]

    def close(self) -> None:
        self.service.close()
        self.engine.check_integrity()
        self.engine.close()
        self.store.close()


@contextmanager
def tiny_chat(folder: Path, **options: Any) -> Iterator[TinyChat]:
    chat = TinyChat(folder, **options)
    try:
        yield chat
    finally:
        chat.close()


def finished(turn: Turn) -> TurnView:
    """Wait until a turn is over and stored; it must not have failed."""
    view = turn.wait(2**62, timeout_s=60)
    assert view.done and view.error is None, view.error
    return view


def logprobs(events: list[Event]) -> list[float]:
    found: list[float] = []
    for event in events:
        if isinstance(event, TokenDelta):
            for item in event.logprobs:
                found += [item.logprob, *(value for _, _, value in item.top)]
    return found
