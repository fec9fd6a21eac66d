"""The debugging view's questions about a stored reply: its tokens one by one, and whose fault a loop in it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.debugging.diagnosis import audited
from engine.debugging.protocol import DiagnoseQuery, TokenMeasure, TokenQuery
from engine.errors import Conflict, InvalidRequest, KVScopeError, NotFound
from sessions.errors import NotStored
from sessions.models import PARTIAL, Message, TokenMeasures
from ui.api.params import parse_params
from ui.chat import ChatService
from ui.stoppable import Stoppable

EXACT = ("logprob", "rank", "entropy", "top1")


@dataclass(frozen=True, slots=True)
class _Reply:
    """A stored reply of the loaded model, the prompt that it answered as it is rendered now, whether that is the one
    of then (as far as its length tells), and what was measured."""

    message: Message
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    same_prompt: bool
    measured: TokenMeasures | None

    def measures(self, kv_format: str) -> tuple[TokenMeasure, ...]:
        """Those that a cache in this format gives for these ids."""
        if self.measured is None or not self.same_prompt or self.measured.kv_format != kv_format:
            return ()
        return tuple(TokenMeasure(*item) for item in self.measured.measures)


class Debugging:
    """Reads store and engine; changes neither. Thread-safe. At most one diagnosis runs per session."""

    def __init__(self, chat: ChatService, audit: Callable[..., Any] | None = None) -> None:
        """`audit`: the engine's audit of a session's live cache, where it has one."""
        self._chat = chat
        self._audit = audit
        self._running = Stoppable("This session is being diagnosed already; wait for it or stop it first.")

    def tokens(
        self, session_id: str, message_id: str | None, start: int, count: int, alternatives: bool
    ) -> dict[str, Any]:
        """The body of `GET /api/sessions/{id}/tokens`. Without `alternatives` what was measured is not run again."""
        engine, reply = self._chat.engine, self._reply(session_id, message_id)
        query = TokenQuery(session_id, reply.prompt_ids, reply.token_ids, start, count)
        live = reply.measures(self._kv_format(session_id))
        end = min(start + count, len(reply.token_ids))
        replayed = alternatives or len(live) < end
        rows = engine.token_table(query) if replayed else engine.token_places(query)
        text = engine.tokenizer.token_text
        found = []
        for index, row in enumerate(rows, start=start):
            token_id, position = reply.token_ids[index], len(reply.prompt_ids) + index
            named = {"index": index, "position": position, "token_id": token_id, "token": text(token_id)}
            measured = _measured(live[index]) if index < len(live) else {}
            found.append({**named, **row, **measured, "measured": "live" if measured else "replay"})
        return {
            "session_id": session_id,
            "message_id": reply.message.id,
            "total": len(reply.token_ids),
            "same_prompt": reply.same_prompt,
            "tokens": found,
        }

    def diagnose(
        self, session_id: str, message_id: str | None, max_tokens: int | None, gone: Callable[[], bool]
    ) -> dict[str, Any]:
        """The body of `POST /api/sessions/{id}/diagnose`; given up as soon as `gone` comes true or it is stopped."""
        engine, reply = self._chat.engine, self._reply(session_id, message_id)
        with self._running.claim(session_id) as stopped:
            stored = _stored_params(reply.message)
            kv_format = self._kv_format(session_id)
            if reply.measured is not None and reply.measured.kv_format in engine.capabilities()["kv_formats"]:
                kv_format = reply.measured.kv_format

            def cancelled() -> bool:
                return stopped.is_set() or gone()

            query = DiagnoseQuery(
                session_id,
                reply.prompt_ids,
                reply.token_ids,
                replace(stored, max_tokens=None),
                reply.measures(kv_format),
                kv_format,
                max_tokens,
                cancelled,
            )
            found = engine.diagnose(query, audited(self._audit, session_id, cancelled))
        return {"session_id": session_id, "message_id": reply.message.id, "same_prompt": reply.same_prompt, **found}

    def stop(self, session_id: str) -> bool:
        """End the session's diagnosis, if one runs; False if none did."""
        return self._running.stop(session_id)

    def _kv_format(self, session_id: str) -> str:
        """In which the session's next turn would be kept."""
        own = self._chat.store.get(session_id).params.get("kv_format")
        return str(own or self._chat.engine.capabilities()["kv_format"])

    def _reply(self, session_id: str, message_id: str | None) -> _Reply:
        """The reply with this id, or the last one of the current branch."""
        store = self._chat.store
        try:
            message = self._last(session_id) if message_id is None else store.message(message_id)
        except NotStored:
            message = None
        if message is None or message.session_id != session_id:
            raise NotFound("There is no message with this id in this session.")
        if message.role != "assistant":
            raise InvalidRequest("Only a reply has tokens to look at.")
        if message.status == PARTIAL:
            raise Conflict("This reply is still being written; wait for it or stop it first.")
        if message.model != self._chat.engine.capabilities()["model"]:
            raise InvalidRequest("This reply was not made by the model that is loaded.")
        if not message.token_ids:
            raise InvalidRequest("No token ids are stored of this reply.")
        try:
            prompt_ids = self._chat.prompt_of(message)
        except KVScopeError:
            prompt_ids = ()
        stats = next((turn.stats for turn in store.turns(session_id) if turn.message_id == message.id), {})
        same = stats.get("prompt_tokens") == len(prompt_ids)
        return _Reply(message, message.token_ids, prompt_ids, same, store.measures(message.id))

    def _last(self, session_id: str) -> Message:
        try:
            self._chat.store.get(session_id)
        except NotStored:
            raise NotFound("There is no session with this id.") from None
        replies = [item for item in self._chat.store.branch(session_id).messages if item.role == "assistant"]
        if not replies:
            raise InvalidRequest("There is no reply in this session yet.")
        return replies[-1]


def _measured(measure: TokenMeasure) -> dict[str, Any]:
    values = {name: getattr(measure, name) for name in EXACT}
    return {name: value if isinstance(value, int) else round(value, 6) for name, value in values.items()}


def _stored_params(message: Message) -> Any:
    """The settings that made a reply; an imported chat may carry any, and then the defaults stand in for them."""
    try:
        return parse_params(message.params)
    except KVScopeError:
        return parse_params({})
