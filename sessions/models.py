"""What is stored: sessions, messages (a tree) and turns. Plain data; ids are UUID strings, times ISO 8601 in UTC."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PARTIAL = "partial"
COMPLETE = "complete"
FAILED = "failed"
STATUSES = (PARTIAL, COMPLETE, FAILED)
INTERRUPTED = "interrupted"
"""The finish reason of a reply whose process ended before the reply did."""
ROLES = ("system", "user", "assistant")
DEFAULT_TITLE = "New chat"


@dataclass(frozen=True, slots=True)
class Message:
    """A node of the tree. Siblings share `parent_id`: an edit or a regenerated reply is a sibling, nothing is lost.

    `token_ids` are the reply's ids as the model produced them (None for user messages and imported text).
    `status` is PARTIAL while a reply streams, then COMPLETE or FAILED (`error` says why). What a crash left PARTIAL is
    COMPLETE with finish reason INTERRUPTED once the store is opened again.
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
    `prompt_date` is the local date and time (ISO 8601 with offset) that a chat template may show. It never changes and
    forks inherit it, so that the head of the prompt stays equal from turn to turn, day to day and fork to fork.
    """

    id: str
    title: str
    system_prompt: str
    params: dict[str, Any]
    head_id: str | None
    first_kept_id: str | None
    created_at: str
    updated_at: str
    prompt_date: str


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A line of the session list. `message_count` counts all branches; `snippet` is the text around a search hit."""

    id: str
    title: str
    updated_at: str
    message_count: int
    snippet: str


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
class TurnInput:
    """What a reply was made from besides its settings (`Message.params`, with the seed): with it, it can be made again.

    `prompt_ids` are all ids of the prompt; `kv_format` how the cache kept K and V; `beams` the settings of a beam
    search, empty without one; `fingerprint` tells what ran: weights, tokenizer, chat template and so on.
    """

    message_id: str
    prompt_ids: tuple[int, ...]
    kv_format: str
    beams: dict[str, Any]
    fingerprint: dict[str, Any]


Measure = tuple[float, int, float, float]
"""Of one token of a reply: its log probability, its rank, the entropy, the likeliest token's probability."""


@dataclass(frozen=True, slots=True)
class TokenMeasures:
    """Of a reply's first tokens, measured while they were sampled from a cache in `kv_format`."""

    kv_format: str
    measures: tuple[Measure, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """The path from the first message to the head. `siblings[id]` are all versions of that message, oldest first."""

    messages: tuple[Message, ...]
    siblings: dict[str, tuple[str, ...]] = field(default_factory=dict)
