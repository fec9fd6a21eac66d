"""What is stored: sessions, messages (a tree) and turns. Plain data; ids are UUID strings, times ISO 8601 in UTC."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PARTIAL = "partial"
COMPLETE = "complete"
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Message:
    """A node of the tree. Siblings share `parent_id`: an edit or a regenerated reply is a sibling, nothing is lost.

    `token_ids` are the reply's ids as the model produced them (None for user messages and imported text).
    `status` is PARTIAL while a reply streams (and after a crash), then COMPLETE or FAILED (`error` says why).
    """

    id: str
    session_id: str
    parent_id: str | None
    role: str
    content: str
    token_ids: tuple[int, ...] | None
    status: str
    finish_reason: str | None
    error: str | None
    params: dict[str, Any]
    model: str | None
    created_at: str


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. `head_id` is the last message of the current branch, None when empty.

    `first_kept_id` is the oldest message still in the prompt once whole turns had to leave a full context.
    """

    id: str
    title: str
    system_prompt: str
    params: dict[str, Any]
    head_id: str | None
    first_kept_id: str | None
    created_at: str
    updated_at: str


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """The numbers of one finished reply: `stats` is the `kvscope` object of the HTTP contract."""

    id: str
    session_id: str
    message_id: str
    model: str
    stats: dict[str, Any]
    created_at: str


@dataclass(frozen=True, slots=True)
class Branch:
    """The current path from the first message to the head; `siblings[id]` lists all versions of that message in order."""

    messages: tuple[Message, ...]
    siblings: dict[str, tuple[str, ...]] = field(default_factory=dict)
