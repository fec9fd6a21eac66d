"""The turns that run now: one act at a time per session, and how a stored user message gets its reply."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from engine.errors import Conflict, KVScopeError
from engine.local import LocalEngine
from engine.prompt import effective_max_tokens
from engine.protocol import GenerateRequest, TimedSpan
from engine.sampling.beam import BeamParams
from engine.sampling.sampler import fresh_seed
from sessions.models import FAILED, PARTIAL, Message, Session, TurnRecord
from sessions.store import SessionStore
from ui.lookup import Lookup
from ui.prompt_plan import PromptPlan, PromptPlanner
from ui.recorder import record
from ui.turn import Turn


class RunningTurns:
    """At most one turn per session. Thread-safe."""

    def __init__(self, store: SessionStore, engine: LocalEngine, planner: PromptPlanner, lookup: Lookup) -> None:
        self._store, self._engine, self._planner, self._lookup = store, engine, planner, lookup
        self._turns: dict[str, Turn] = {}
        self._claimed: set[str] = set()
        self._causes: dict[str, str] = {}
        self._lock = threading.Lock()

    def find(self, session_id: str) -> Turn | None:
        with self._lock:
            return self._turns.get(session_id)

    def claimed(self, session_id: str) -> bool:
        """Whether an act of the session is under way."""
        with self._lock:
            return session_id in self._claimed

    @contextmanager
    def claim(self, session_id: str) -> Iterator[Session]:
        """One act at a time per session; a running turn counts as one until its reply is stored."""
        session = self._lookup.session(session_id)
        with self._lock:
            if session_id in self._claimed or session_id in self._turns:
                raise Conflict("This session is still answering; wait for the reply or stop it first.")
            self._claimed.add(session_id)
        try:
            yield session
        finally:
            with self._lock:
                self._claimed.discard(session_id)

    def note(self, session_id: str, cause: str) -> None:
        """Something other than a turn changed the session's history; the next turn's miss names it."""
        self._causes[session_id] = cause

    def answer(
        self, session: Session, user: Message, plan: PromptPlan, cause: str | None, beams: BeamParams | None = None
    ) -> Turn:
        """Store an empty reply to a user message of a claimed session, and have the engine fill it."""
        params = plan.params if plan.params.seed is not None else replace(plan.params, seed=fresh_seed())
        # Settings and seed are all the random state there is: with them the reply can be made again.
        reply = self._store.add_message(
            session.id,
            user.id,
            "assistant",
            "",
            status=PARTIAL,
            params=asdict(params),
            model=self._planner.model_name,
        )
        self._remember_first_kept(session, plan, user)
        prompt_ids = plan.fitted.prompt.token_ids
        last_turn = next(reversed(self._store.turns(session.id)), None)
        request = GenerateRequest(
            prompt_ids=prompt_ids,
            params=params,
            session_id=session.id,
            cause=self._cause(session.id, cause, last_turn, plan),
            stored_cache_pos=_cached_then(last_turn),
            beams=beams or BeamParams(),
            before=(plan.rendered, TimedSpan("store", plan.rendered.end, time.perf_counter())),
        )
        limit = effective_max_tokens(len(prompt_ids), self._planner.context_limit, plan.params.max_tokens)
        turn = Turn(request.request_id, session.id, user.id, reply.id, plan.dropped, limit)
        # Before the engine has it, which may take seconds where a cache has to be made or read first.
        with self._lock:
            self._turns[session.id] = turn
        try:
            stream = self._engine.generate(request)
        except KVScopeError as error:
            self._store.update_message(reply.id, status=FAILED, finish_reason="error", error=str(error))
            self._turn_over(session.id)
            turn.close(error)
            raise
        made_by = self._planner.made_by(request, reply.id)
        record(self._store, turn, stream, made_by, lambda: self._turn_over(session.id))
        return turn

    def close(self) -> None:
        """End every running turn and wait until what they produced is stored."""
        with self._lock:
            turns = list(self._turns.values())
        for turn in turns:
            turn.cancel()
        for turn in turns:
            turn.wait(2**62, timeout_s=10)

    def _cause(self, session_id: str, act: str | None, last_turn: TurnRecord | None, plan: PromptPlan) -> str | None:
        """The caller's word for what became of the history since the last turn, should the cache miss."""
        earlier_act = self._causes.pop(session_id, None)
        if last_turn is not None and last_turn.model != self._planner.model_name:
            return "model"
        if act or earlier_act or plan.fitted.dropped:
            return act or earlier_act or "context_full"
        return "thoughts" if plan.stripped else None

    def _turn_over(self, session_id: str) -> None:
        with self._lock:
            self._turns.pop(session_id, None)

    def _remember_first_kept(self, session: Session, plan: PromptPlan, user: Message) -> None:
        """So that the next prompts begin at the same message; it may be the one being sent, not stored when planned."""
        if plan.fitted.dropped:
            first_kept_id = plan.message_ids[plan.fitted.first_kept] or user.id
            if first_kept_id != session.first_kept_id:
                self._store.update(session.id, first_kept_id=first_kept_id)


def _cached_then(last_turn: TurnRecord | None) -> int:
    """Tokens in the cache after the last turn; an imported chat may carry any numbers, or none."""
    count = last_turn.stats.get("cache_pos") if last_turn is not None else None
    return count if isinstance(count, int) and count > 0 else 0
