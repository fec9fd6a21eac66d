"""What an act will cost before it is done, and what misses have cost: from a session's own turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import InvalidRequest
from engine.local import LocalEngine
from sessions.models import Session, TurnRecord
from sessions.store import SessionStore
from ui.api.params import parse_params
from ui.checks import check_content
from ui.lookup import Lookup
from ui.prompt_plan import PromptPlanner

ACTIONS = ("send", "edit", "regenerate", "undo", "fork", "kv_format", "strip_thoughts", "keep_thoughts")
UNASKED = ("undo", "fork", "strip_thoughts", "keep_thoughts")
"""Acts that ask the model nothing: what they cost comes with the next message."""
MEASURED_TURNS = 10
KEPT_MISSES = 50


@dataclass(frozen=True, slots=True)
class PromptPreview:
    """What sending a text would cost: tokens of the prompt, how many of them are cached, which messages would leave."""

    prompt_tokens: int
    reused_tokens: int
    context_limit: int
    dropped: tuple[str, ...]


class Prices:
    """Of the acts on stored sessions. Changes nothing; thread-safe."""

    def __init__(self, store: SessionStore, engine: LocalEngine, planner: PromptPlanner, lookup: Lookup) -> None:
        self._store, self._engine, self._planner, self._lookup = store, engine, planner, lookup

    def preview(self, session_id: str, content: str) -> PromptPreview:
        """What sending `content` now would cost. Raises `ContextOverflow` if it can't fit."""
        session = self._lookup.session(session_id)
        plan = self._planner.plan(session, self._store.branch(session_id).messages, None, content)
        ids = plan.fitted.prompt.token_ids
        reused = self._engine.cached_prefix(session_id, ids)
        return PromptPreview(len(ids), reused, self._planner.context_limit, plan.dropped)

    def price(
        self, session_id: str, action: str, message_id: str | None = None, content: str | None = None
    ) -> dict[str, Any]:
        """What an act would have to compute if it were done now, and how long that takes; nothing is changed.

        An edit is priced with the text it brings (default: the old one); an undo, a fork and a setting by what the next
        prompt finds. Raises `InvalidRequest`, `NotFound` and `ContextOverflow` as the act itself would.
        """
        session = self._lookup.session(session_id)
        turns = self._store.turns(session_id)
        if action not in ACTIONS:
            raise InvalidRequest(f"action must be one of {', '.join(ACTIONS)}.")
        if action == "kv_format":
            branch = self._store.branch(session_id).messages
            return price(action, len(self._planner.history(session, branch)), 0, turns)
        ids = self._ids_after(session, action, message_id, content)
        reused = self._engine.cached_prefix(session_id, ids) if ids else 0
        if action in UNASKED:  # no prompt yet: its last token counts once there is one
            reused += reused == len(ids) - 1
        return price(action, len(ids), reused, turns)

    def misses(self, session_id: str) -> list[dict[str, Any]]:
        """Why cached tokens were dropped in the session's turns, newest first."""
        return miss_cards(self._store.turns(self._lookup.session(session_id).id))

    def _ids_after(self, session: Session, action: str, message_id: str | None, content: str | None) -> tuple[int, ...]:
        """The prompt that an act leads to, or what it leaves of the history."""
        if action == "fork":
            path = self._lookup.path_to(session.id, message_id or session.head_id)
            return self._planner.history(session, path)
        if action in ("strip_thoughts", "keep_thoughts"):
            params = replace(parse_params(session.params), strip_thoughts=action == "strip_thoughts")
            return self._planner.history(session, self._store.branch(session.id).messages, params)
        if action == "send":
            check_content(content or "")
            path = self._store.branch(session.id).messages
            return self._planner.plan(session, path, None, content).fitted.prompt.token_ids
        user = self._lookup.user_message_of(session.id, message_id or session.head_id)
        before = self._lookup.path_to(session.id, user.parent_id)
        if action == "undo":
            return self._planner.history(session, before)
        text = user.content if content is None or action == "regenerate" else content
        return self._planner.plan(session, before, None, text).fitted.prompt.token_ids


def prefill_speed(turns: Sequence[TurnRecord]) -> float | None:
    """Prompt tokens per second over the last turns that evaluated some; None if nothing was measured yet.

    What imported chats carry as numbers is not trusted.
    """
    tokens = seconds = 0.0
    for turn in turns[-MEASURED_TURNS:]:
        computed, ms = turn.stats.get("computed_tokens"), turn.stats.get("prefill_ms")
        if _is_number(computed) and _is_number(ms):
            tokens, seconds = tokens + computed, seconds + ms / 1e3
    return tokens / seconds if tokens and seconds else None


def price(action: str, prompt_tokens: int, reused_tokens: int, turns: Sequence[TurnRecord]) -> dict[str, Any]:
    """The body of `POST /api/sessions/{id}/price`."""
    tokens, speed = max(prompt_tokens - reused_tokens, 0), prefill_speed(turns)
    return {
        "action": action,
        "prompt_tokens": prompt_tokens,
        "reused_tokens": reused_tokens,
        "tokens": tokens,
        "seconds": None if speed is None else round(tokens / speed, 3),
        "tokens_per_s": None if speed is None else round(speed, 1),
    }


def miss_cards(turns: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """The last misses of a session, newest first, each with the reply and the time it belongs to."""
    cards = [
        {"message_id": turn.message_id, "at": turn.created_at, "model": turn.model, **turn.stats["miss"]}
        for turn in turns
        if isinstance(turn.stats.get("miss"), Mapping)
    ]
    return cards[: -KEPT_MISSES - 1 : -1]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
