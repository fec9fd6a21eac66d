"""A session as a JSON object (everything, all branches) or as Markdown (the current branch, for reading)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sessions import checks
from sessions.errors import InvalidData
from sessions.inputs import inputs_from, plain_inputs
from sessions.json_record import JsonRecord
from sessions.models import COMPLETE, INTERRUPTED, PARTIAL, Branch, Message, Session, TurnInput, TurnRecord

FORMAT = "kvscope-session"
VERSION = 1


@dataclass(frozen=True, slots=True)
class SessionTree:
    """A whole session: `messages` in creation order, parents before children; `turns` and `inputs` likewise."""

    session: Session
    messages: tuple[Message, ...]
    turns: tuple[TurnRecord, ...]
    inputs: tuple[TurnInput, ...] = ()


def to_json(tree: SessionTree) -> dict[str, Any]:
    """`{format, version, session, messages, turns, inputs}` of plain JSON values, rows without their `session_id`.

    `inputs` came later than the rest of version 1: files without them are read, and older programs ignore them.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "session": _plain(tree.session),
        "messages": [_plain(message) for message in tree.messages],
        "turns": [_plain(turn) for turn in tree.turns],
        "inputs": plain_inputs(tree.inputs),
    }


def from_json(data: object) -> SessionTree:
    """Check everything in an export. Raises `InvalidData` with the first thing that is wrong, counting from 1.

    A reply that was PARTIAL when exported becomes COMPLETE and INTERRUPTED: nobody will finish it here.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise InvalidData("This is not a session export of KVScope.")
    top = JsonRecord("The file", data)
    _check_version(top.get("version"))
    session = _session(JsonRecord("The session", top.get("session")))
    messages = _messages(session.id, top.records("messages", "Message"))
    known = {message.id for message in messages}
    for name, target in (("head_id", session.head_id), ("first_kept_id", session.first_kept_id)):
        if target is not None and target not in known:
            raise InvalidData(f'The session\'s "{name}" names a message that is not in the file.')
    turns = tuple(_turn(session.id, record, known) for record in top.records("turns", "Turn"))
    _refuse_duplicates("turn", (turn.id for turn in turns))
    inputs = inputs_from(top.records("inputs", "Input") if "inputs" in top else [], known)
    _refuse_duplicates("input", (item.message_id for item in inputs))
    return SessionTree(session, messages, turns, inputs)


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
    inputs = tuple(replace(item, message_id=new[item.message_id]) for item in tree.inputs)
    return SessionTree(session, messages, tuple(turns), inputs)


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


def _session(record: JsonRecord) -> Session:
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


def _messages(session_id: str, records: Sequence[JsonRecord]) -> tuple[Message, ...]:
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


def _message(session_id: str, record: JsonRecord) -> Message:
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


def _turn(session_id: str, record: JsonRecord, messages: set[str]) -> TurnRecord:
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
