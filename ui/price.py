"""What an act will cost before it is done, and what misses have cost: from a session's own turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sessions.models import TurnRecord

ACTIONS = ("send", "edit", "regenerate", "undo", "fork", "kv_format")
MEASURED_TURNS = 10
KEPT_MISSES = 50


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
