"""The product's promise: whatever was done to a conversation, the next reply is that of a fresh run over the same ids.

A state machine sends, edits, regenerates, undoes, forks, stops, deletes, switches branches and restarts, over real
SQLite files and real engines on a pool so small that sessions displace each other, to RAM and disk, whence they come
back after a restart too. After every turn the same prompt runs on an engine with an empty cache: same ids, same log
probabilities.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import Event, Finished, GenerateRequest, TokenDelta
from engine.sampling.params import SamplingParams
from engine.sampling.prompt_lookup import Guess, PromptLookup
from engine.turns import speculation
from engine.turns.turn import QueueStream
from sessions.store import SessionStore
from tests.support.engines import RecordingEngine, run, tiny_engine
from ui.chat import ChatService
from ui.turn import Turn

TEXTS = st.sampled_from(
    ["hi", "What is a cat?", "世界 é", "Tell me more, please.", "<|im_end|>", "  two  spaces ", "x" * 70]
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.9]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 9),
    top_logprobs=st.just(2),
    stop=st.sampled_from([(), ("e",)]),
)
TOLERANCE = {"fp32": 1e-3, "int8": 0.02, "int4": 0.2}
"""Of log probabilities. A chunk cut elsewhere rounds K and V differently, which can move a code by one step."""


@cache
def fresh_engine(kind: str, kv_format: str, window: int | None, sinks: int) -> RecordingEngine:
    return tiny_engine(kind=kind, context=160, max_seq_len=160, kv_format=kv_format, window=window, sinks=sinks)


def fresh_run(case: Conversations, request: GenerateRequest) -> list[Event]:
    """The request on an engine that has computed nothing before."""
    engine = fresh_engine(case.kind, case.kv_format, case.window, case.sinks)
    engine._call(lambda: forget_all(engine._steps().prefix_cache))
    return run(engine, GenerateRequest(request.prompt_ids, request.params))


def forget_all(prefixes: PrefixCache) -> None:
    prefixes.evict(10_000)
    if prefixes.checkpoints is not None:
        prefixes.checkpoints.evict(10_000)


def logprobs(events) -> list[float]:
    return [lp.logprob for event in events if isinstance(event, TokenDelta) for lp in event.logprobs]


class Conversations(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    kind = "llama"
    kv_format = "fp32"
    states: int | None = None
    blocks = 70
    window: int | None = None
    sinks = 0
    speculation = "off"

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self._start()

    def _start(self) -> None:
        self.store = SessionStore(Path(self.folder.name) / "chats.db")
        self.engine = tiny_engine(
            kind=self.kind,
            context=160,
            max_seq_len=160,
            blocks=self.blocks,
            window=self.window,
            sinks=self.sinks,
            states=self.states,
            kv_format=self.kv_format,
            speculation=self.speculation,
            data_dir=Path(self.folder.name),
            snapshot_limit=2**20,
            ram_limit=2**17,
        )
        self.chat = ChatService(self.store, self.engine)
        self.stop_after: int | None = None
        turns = self.engine._steps().turns
        start = turns.start

        def start_and_stop(request: GenerateRequest, stream: QueueStream, *rest: Any) -> None:
            """On the engine thread, so that where a reply is stopped is no matter of time."""
            after, put, events = self.stop_after, stream.put, itertools.count(1)

            def counted(event: Event) -> None:
                put(event)
                if next(events) == after:
                    stream.cancel()

            stream.put = counted
            start(request, stream, *rest)
            if after == 0:
                stream.cancel()

        turns.start = start_and_stop

    def teardown(self) -> None:
        if hasattr(self, "chat"):
            self._stop()
            self.folder.cleanup()

    def _stop(self) -> None:
        self.chat.close()
        self.engine.check_integrity()
        self.engine.close()
        self.store.close()

    def _finish(self, turn: Turn) -> None:
        """Wait for a turn, then hold it against a fresh run over the same ids."""
        view = turn.wait(2**62, timeout_s=30)
        assert view.done and view.error is None, view.error
        request = self.engine.requests[-1]
        events = fresh_run(self, request)
        fresh = events[-1]
        assert isinstance(fresh, Finished) and fresh.stats.reused_tokens == 0
        if view.finish_reason == "cancelled":
            assert fresh.text.startswith(view.text)
        else:
            assert (view.token_ids, view.text) == (fresh.token_ids, fresh.text)
            assert logprobs(turn._events) == pytest.approx(logprobs(events), abs=TOLERANCE[self.kv_format])
        stored = self.store.message(turn.message_id)
        assert (stored.content, stored.token_ids) == (view.text, view.token_ids)
        report = self.engine.inspect(turn.session_id)
        history = [*request.prompt_ids, *view.token_ids]
        assert report["token_ids"] == history[: report["cache_pos"]]
        # A turn stopped early may not have run all of its prompt; half characters leave the history as text. Whatever
        # leaves the end of a reply takes a recurrent state with it.
        if self.states is not None and report["cache_pos"] < len(history) - 1:
            assert report["cache_pos"] in (0, *report["state"]["checkpoints"])
        elif view.finish_reason != "cancelled" and "\ufffd" not in view.text:
            # More than a few tokens that leave the end of a reply may be more than a window can go back.
            windows = any(group["window"] is not None for group in report["groups"])
            assert report["cache_pos"] >= len(request.prompt_ids if windows and self.stops(request) else history) - 1
        assert all(report["invariants"].values()), report["invariants"]

    @staticmethod
    def stops(request: GenerateRequest) -> bool:
        return bool(request.params.stop)

    @rule(target=sessions, system=st.sampled_from(["", "Be brief."]))
    def create(self, system: str) -> str:
        return self.store.create(system_prompt=system).id

    @rule(session=sessions, text=TEXTS, params=PARAMS)
    def send(self, session: str, text: str, params: SamplingParams) -> None:
        self._finish(self.chat.send(session, text, params))

    @rule(session=sessions, text=TEXTS, params=PARAMS, events=st.integers(0, 5))
    def send_and_stop(self, session: str, text: str, params: SamplingParams, events: int) -> None:
        """After so many events: pieces of the prompt that have been read, and tokens."""
        self.stop_after = events
        turn = self.chat.send(session, text, params)
        self._finish(turn)
        self.stop_after = None

    @rule(session=sessions, text=TEXTS, params=PARAMS, data=st.data())
    def edit(self, session: str, text: str, params: SamplingParams, data) -> None:
        users = [message.id for message in self.store.branch(session).messages if message.role == "user"]
        if users:
            self._finish(self.chat.edit(session, data.draw(st.sampled_from(users)), text, params))

    @rule(session=sessions, params=PARAMS)
    def regenerate(self, session: str, params: SamplingParams) -> None:
        if self.store.branch(session).messages:
            self._finish(self.chat.regenerate(session, None, params))

    @rule(session=sessions)
    def undo(self, session: str) -> None:
        if self.store.branch(session).messages:
            self.chat.undo(session)

    @rule(session=sessions, data=st.data())
    def switch_branch(self, session: str, data) -> None:
        branch = self.store.branch(session)
        choices = [other for versions in branch.siblings.values() for other in versions]
        if choices:
            self.chat.select_branch(session, data.draw(st.sampled_from(choices)))

    @rule(session=sessions, data=st.data())
    def delete_message(self, session: str, data) -> None:
        messages = self.store.branch(session).messages
        if messages:
            self.chat.delete_message(session, data.draw(st.sampled_from(messages)).id)

    @rule(session=sessions, data=st.data())
    def replace_reply(self, session: str, data) -> None:
        replies = [message for message in self.store.branch(session).messages if message.role == "assistant"]
        if replies:
            self.chat.edit_reply(session, data.draw(st.sampled_from(replies)).id, "My own words.")

    @rule(target=sessions, session=sessions)
    def fork(self, session: str) -> str:
        return self.chat.fork(session).id

    @rule(session=sessions)
    def change_system_prompt(self, session: str) -> None:
        self.chat.update_session(session, {"system_prompt": "Be very brief."})

    @rule()
    def restart(self) -> None:
        self._stop()
        self._start()

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()


class HybridConversations(Conversations):
    """Attention and recurrence; the states of a handful of sessions fit, so checkpoints come and go."""

    kind = "bamba"
    states = 6


class RecurrentConversations(Conversations):
    """Nothing but recurrence; there is hardly more than the state that is being used."""

    kind = "mamba2"
    states = 3


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=25, stateful_step_count=40, suppress_health_check=list(HealthCheck))


class Int8Conversations(Conversations):
    kv_format = "int8"


class Int4Conversations(Conversations):
    kv_format = "int4"


TestInt8Conversations, TestInt4Conversations = Int8Conversations.TestCase, Int4Conversations.TestCase
for case in (TestInt8Conversations, TestInt4Conversations):
    case.settings = settings(TestConversations.settings, max_examples=6)
TestHybridConversations = HybridConversations.TestCase
TestHybridConversations.settings = settings(TestConversations.settings, max_examples=8)
TestRecurrentConversations = RecurrentConversations.TestCase
TestRecurrentConversations.settings = settings(TestConversations.settings, max_examples=8)


class BoldLookup(PromptLookup):
    """Has a guess for every step: in want of a better one, that the last token comes again."""

    def guess(self, token_ids: Sequence[int], most: int) -> Guess:
        guess = super().guess(token_ids, most)
        return guess if guess.token_ids else Guess((token_ids[-1],) * most, 2)


class DraftConversations(Conversations):
    """Each step of a reply runs drafts, most of which do not come true; the fresh run has none."""

    speculation = "on"

    def _start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(speculation, "PromptLookup", BoldLookup)
        super()._start()

    def _stop(self) -> None:
        tokens = self.engine.metrics()["tokens"]
        assert tokens["accepted"] <= tokens["drafted"] and (tokens["drafted"] or tokens["generated"] < 30)
        self.patch.undo()
        super()._stop()


class DraftWindowConversations(DraftConversations):
    kind = "qwen3-window"
    blocks = 110
    window = 24
    sinks = 5


class WindowConversations(Conversations):
    """Every layer gives up what lies far back."""

    window = 24
    blocks = 40


class SinkConversations(WindowConversations):
    sinks = 5


class LocalAndGlobalConversations(Conversations):
    """Some layers see a window, the others all."""

    kind = "qwen3-window"
    blocks = 110


class SharedStoreConversations(Conversations):
    """The last layers read what earlier ones store, some behind a window."""

    kind = "gemma3n"
    blocks = 150


class HybridWindowConversations(HybridConversations):
    """States and windows: a sequence goes back to where it has both."""

    window = 24
    sinks = 2
    blocks = 40


TestWindowConversations, TestSinkConversations = WindowConversations.TestCase, SinkConversations.TestCase
TestLocalAndGlobalConversations = LocalAndGlobalConversations.TestCase
TestDraftConversations, TestDraftWindowConversations = DraftConversations.TestCase, DraftWindowConversations.TestCase
TestSharedStoreConversations = SharedStoreConversations.TestCase
TestHybridWindowConversations = HybridWindowConversations.TestCase
for case in (
    TestWindowConversations,
    TestSinkConversations,
    TestLocalAndGlobalConversations,
    TestSharedStoreConversations,
    TestHybridWindowConversations,
    TestDraftConversations,
    TestDraftWindowConversations,
):
    case.settings = settings(TestConversations.settings, max_examples=6)
