"""A session as a JSON object (everything, all branches) or as Markdown (the current branch, for reading)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from sessions import checks
from sessions.errors import InvalidData
from sessions.models import COMPLETE, INTERRUPTED, PARTIAL, Branch, Message, Session, TurnRecord

FORMAT = "kvscope-session"
VERSION = 1
MAX_MESSAGES = 100_000
MAX_DATE = 40
"""Characters of an ISO date and time."""


@dataclass(frozen=True, slots=True)
class SessionTree:
    """A whole session: `messages` in creation order, parents before children; `turns` likewise."""

    session: Session
    messages: tuple[Message, ...]
    turns: tuple[TurnRecord, ...]


def to_json(tree: SessionTree) -> dict[str, Any]:
    """`{format, version, session, messages, turns}` of plain JSON values; `session_id` is left out of the rows."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "session": _plain(tree.session),
        "messages": [_plain(message) for message in tree.messages],
        "turns": [_plain(turn) for turn in tree.turns],
    }


def from_json(data: object) -> SessionTree:
    """Check everything in an export. Raises `InvalidData` with the first thing that is wrong, counting from 1.

    A reply that was PARTIAL when exported becomes COMPLETE and INTERRUPTED: nobody will finish it here.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise InvalidData("This is not a session export of KVScope.")
    top = _Record("The file", data)
    _check_version(top.get("version"))
    session = _session(_Record("The session", top.get("session")))
    messages = _messages(session.id, top.records("messages", "Message"))
    known = {message.id for message in messages}
    for name, target in (("head_id", session.head_id), ("first_kept_id", session.first_kept_id)):
        if target is not None and target not in known:
            raise InvalidData(f'The session\'s "{name}" names a message that is not in the file.')
    turns = tuple(_turn(session.id, record, known) for record in top.records("turns", "Turn"))
    _refuse_duplicates("turn", (turn.id for turn in turns))
    return SessionTree(session, messages, turns)


def _check_version(version: object) -> None:
    if type(version) is not int:
        raise InvalidData(f'The file: "version" must be a whole number without quotes, such as {VERSION}.')
    if version != VERSION:
        shown = str(version) if abs(version) < 10**20 else "far beyond any"
        raise InvalidData(f"This export has version {shown}; this KVScope reads version {VERSION}.")


def with_new_ids(tree: SessionTree) -> SessionTree:
    """The same session under new UUIDs throughout, for a store that already holds it."""
    session = tree.session
    old = [session.id, *(message.id for message in tree.messages), *(turn.id for turn in tree.turns)]
    new = {item: str(uuid.uuid4()) for item in old}
    session_id = new[session.id]
    messages = tuple(
        replace(item, id=new[item.id], session_id=session_id, parent_id=_mapped(new, item.parent_id))
        for item in tree.messages
    )
    turns = []
    for turn in tree.turns:
        stats = {**turn.stats, "session_id": session_id} if "session_id" in turn.stats else turn.stats
        message_id = new[turn.message_id]
        turns.append(replace(turn, id=new[turn.id], session_id=session_id, message_id=message_id, stats=stats))
    head_id, kept_id = _mapped(new, session.head_id), _mapped(new, session.first_kept_id)
    session = replace(session, id=session_id, head_id=head_id, first_kept_id=kept_id)
    return SessionTree(session, messages, tuple(turns))


def to_markdown(session: Session, branch: Branch) -> str:
    """The current branch as a document: title, system prompt, then one heading per message."""
    parts = [f"# {session.title}"]
    if session.system_prompt:
        parts.append(f"## System\n\n{session.system_prompt}")
    for message in branch.messages:
        heading = f"## {message.role.capitalize()}"
        if message.model:
            heading += f" ({message.model})"
        parts.append(f"{heading}\n\n{message.content}".rstrip())
    return "\n\n".join(parts) + "\n"


class _Record:
    """A JSON object of an import, with the name that error sentences call it by."""

    def __init__(self, name: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise InvalidData(f"{name} must be a JSON object.")
        self.name = name
        self._value = value

    def label(self, key: str) -> str:
        return f'{self.name}: "{key}"'

    def get(self, key: str) -> Any:
        if key not in self._value:
            raise InvalidData(f'{self.name} has no "{key}".')
        return self._value[key]

    def uuid(self, key: str) -> str:
        value = self.get(key)
        if not checks.is_uuid(value):
            raise InvalidData(f"{self.label(key)} must be a UUID.")
        return str(value)

    def optional_uuid(self, key: str) -> str | None:
        return None if self.get(key) is None else self.uuid(key)

    def text(self, key: str, limit: int = checks.MAX_TEXT) -> str:
        return checks.check_text(self.label(key), self.get(key), limit)

    def optional_text(self, key: str) -> str | None:
        return checks.check_optional_text(self.label(key), self.get(key))

    def object(self, key: str) -> dict[str, Any]:
        return checks.parse_json(checks.check_json(self.label(key), self.get(key)))

    def time(self, key: str) -> datetime:
        try:
            return datetime.fromisoformat(self.text(key, MAX_DATE))
        except ValueError as error:
            raise InvalidData(f"{self.label(key)} must be an ISO date and time.") from error

    def utc(self, key: str) -> str:
        try:
            return self.time(key).astimezone(UTC).isoformat(timespec="microseconds")
        except (ValueError, OverflowError, OSError) as error:
            raise InvalidData(f"{self.label(key)} is out of range.") from error

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise InvalidData(f"{self.label(key)} must be a list or null.")
        return checks.check_token_ids(self.label(key), value)

    def records(self, key: str, name: str) -> list[_Record]:
        value = self.get(key)
        if not isinstance(value, list):
            raise InvalidData(f"{self.label(key)} must be a list.")
        if len(value) > MAX_MESSAGES:
            raise InvalidData(f"{self.label(key)} has {len(value)} entries; at most {MAX_MESSAGES} can be imported.")
        return [_Record(f"{name} {number}", item) for number, item in enumerate(value, start=1)]


def _session(record: _Record) -> Session:
    record.time("prompt_date")
    return Session(
        id=record.uuid("id"),
        title=checks.check_title(record.get("title")),
        system_prompt=record.text("system_prompt"),
        params=record.object("params"),
        head_id=record.optional_uuid("head_id"),
        first_kept_id=record.optional_uuid("first_kept_id"),
        created_at=record.utc("created_at"),
        updated_at=record.utc("updated_at"),
        prompt_date=record.text("prompt_date"),
    )


def _messages(session_id: str, records: Sequence[_Record]) -> tuple[Message, ...]:
    messages = tuple(_message(session_id, record) for record in records)
    _refuse_duplicates("message", (message.id for message in messages))
    known = {message.id for message in messages}
    before: set[str] = set()
    for number, message in enumerate(messages, start=1):
        if message.parent_id is not None and message.parent_id not in known:
            raise InvalidData(f"Message {number} names a parent that is not in the file.")
        # Parents first also rules out cycles: no message can be below itself.
        if message.parent_id is not None and message.parent_id not in before:
            raise InvalidData(f"Message {number} comes before its parent, or is below itself.")
        before.add(message.id)
    return messages


def _message(session_id: str, record: _Record) -> Message:
    status = checks.check_status(record.label("status"), record.get("status"))
    finish_reason = record.optional_text("finish_reason")
    return Message(
        id=record.uuid("id"),
        session_id=session_id,
        parent_id=record.optional_uuid("parent_id"),
        role=checks.check_role(record.label("role"), record.get("role")),
        content=record.text("content"),
        token_ids=record.token_ids("token_ids"),
        status=COMPLETE if status == PARTIAL else status,
        finish_reason=INTERRUPTED if status == PARTIAL else finish_reason,
        error=record.optional_text("error"),
        params=record.object("params"),
        model=record.optional_text("model"),
        created_at=record.utc("created_at"),
    )


def _turn(session_id: str, record: _Record, messages: set[str]) -> TurnRecord:
    message_id = record.uuid("message_id")
    if message_id not in messages:
        raise InvalidData(f"{record.name} names a message that is not in the file.")
    return TurnRecord(
        id=record.uuid("id"),
        session_id=session_id,
        message_id=message_id,
        model=record.text("model", checks.MAX_LABEL),
        stats=record.object("stats"),
        created_at=record.utc("created_at"),
    )


def _refuse_duplicates(what: str, ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for number, item in enumerate(ids, start=1):
        if item in seen:
            raise InvalidData(f"{what.capitalize()} {number} has the id of an earlier {what}.")
        seen.add(item)


def _mapped(new: Mapping[str, str], old: str | None) -> str | None:
    return None if old is None else new[old]


def _plain(item: Session | Message | TurnRecord) -> dict[str, Any]:
    record = {field.name: getattr(item, field.name) for field in fields(item) if field.name != "session_id"}
    if record.get("token_ids") is not None:
        record["token_ids"] = list(record["token_ids"])
    return record
