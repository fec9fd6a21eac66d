"""The one door to stored sessions. Every method is one short transaction and safe from any thread."""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final

from sqlite_utils import Database

from sessions import checks, export, rows, search, tree, whole
from sessions.database import SessionDatabase
from sessions.errors import InvalidData, NotStored, StoreError
from sessions.models import (
    COMPLETE,
    DEFAULT_TITLE,
    INTERRUPTED,
    PARTIAL,
    Branch,
    Message,
    Session,
    SessionSummary,
)
from sessions.turn_store import TurnStore

__all__ = ["UNCHANGED", "InvalidData", "NotStored", "SessionStore", "StoreError"]


class _Unchanged(Enum):
    UNCHANGED = "unchanged"


UNCHANGED: Final = _Unchanged.UNCHANGED
"""Default of the update methods' arguments, where None is a value of its own."""

FORK_SUFFIX = " (fork)"


def _local_now() -> datetime:
    return datetime.now().astimezone()


class SessionStore(TurnStore):
    """Sessions, their message trees and the numbers of their turns in the SQLite file at `path`.

    One process at a time: a second one gets a `StoreError`. `clock` gives the local time with its offset.
    All methods raise `StoreError`; `NotStored` for an unknown session or message, `InvalidData` for bad values.
    """

    def __init__(
        self, path: Path | str, *, busy_timeout_s: float = 10.0, clock: Callable[[], datetime] = _local_now
    ) -> None:
        self._clock = clock
        self._database = SessionDatabase(Path(path), busy_timeout_s)
        try:
            self.recovered = self._recover()
            """Replies that a crash had left unfinished when the store was opened."""
        except StoreError:
            self._database.close()
            raise

    def close(self) -> None:
        """Close all connections and let another process open the store. May be called more than once."""
        self._database.close()

    # Sessions

    def create(
        self, title: str | None = None, system_prompt: str = "", params: Mapping[str, Any] | None = None
    ) -> Session:
        """A new, empty session; without a title it is called "New chat"."""
        now = self._clock()
        session = Session(
            id=str(uuid.uuid4()),
            title=DEFAULT_TITLE if title is None else checks.check_title(title),
            system_prompt=checks.check_text("The system prompt", system_prompt),
            params=checks.parse_json(checks.check_json("params", params or {})),
            head_id=None,
            first_kept_id=None,
            created_at=rows.utc(now),
            updated_at=rows.utc(now),
            prompt_date=now.isoformat(),
        )
        with self._database.write() as db:
            rows.insert_session(db, session)
        return session

    def get(self, session_id: str) -> Session:
        with self._database.read() as db:
            return tree.find_session(db, session_id)

    def list(self, query: str = "", limit: int = 200) -> builtins.list[SessionSummary]:
        """Sessions, newest change first; with a query those whose title or one message holds all its words."""
        with self._database.read() as db:
            return search.list_sessions(db, query, limit)

    def update(
        self,
        session_id: str,
        *,
        title: str | _Unchanged = UNCHANGED,
        system_prompt: str | _Unchanged = UNCHANGED,
        params: Mapping[str, Any] | _Unchanged = UNCHANGED,
        head_id: str | _Unchanged | None = UNCHANGED,
        first_kept_id: str | _Unchanged | None = UNCHANGED,
    ) -> Session:
        """Change what is given. Moving the head or the first kept message alone leaves `updated_at` as it is."""
        values: dict[str, Any] = {}
        if title is not UNCHANGED:
            values["title"] = checks.check_title(title)
        if system_prompt is not UNCHANGED:
            values["system_prompt"] = checks.check_text("The system prompt", system_prompt)
        if params is not UNCHANGED:
            values["params"] = checks.check_json("params", params)
        if values:
            values["updated_at"] = rows.utc(self._clock())
        with self._database.write() as db:
            tree.find_session(db, session_id)
            for name, link in (("head_id", head_id), ("first_kept_id", first_kept_id)):
                if link is not UNCHANGED:
                    values[name] = None if link is None else tree.find_message(db, link, session_id).id
            rows.update(db, "sessions", session_id, values)
            return tree.find_session(db, session_id)

    def delete(self, session_id: str) -> None:
        """Remove a session with its messages and turns."""
        with self._database.write() as db:
            tree.find_session(db, session_id)
            db.execute("DELETE FROM sessions WHERE id = ?", [session_id])

    # Messages

    def message(self, message_id: str) -> Message:
        with self._database.read() as db:
            return tree.find_message(db, message_id)

    def branch(self, session_id: str) -> Branch:
        """The messages from the first to the head, with all versions of each in creation order."""
        with self._database.read() as db:
            return _branch(db, tree.find_session(db, session_id))

    def siblings(self, message_id: str) -> tuple[str, ...]:
        """All versions of a message, itself included, in creation order."""
        with self._database.read() as db:
            return tree.sibling_ids(db, tree.find_message(db, message_id))

    def leaf_below(self, message_id: str) -> str:
        """The message reached by following the newest child each time; the message itself if it has none."""
        with self._database.read() as db:
            return tree.newest_leaf(db, message_id)

    def add_message(
        self,
        session_id: str,
        parent_id: str | None,
        role: str,
        content: str,
        *,
        token_ids: Sequence[int] | None = None,
        status: str = COMPLETE,
        params: Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> Message:
        """Append below `parent_id` (None: a first message) and make the new message the head."""
        now = rows.utc(self._clock())
        message = Message(
            id=str(uuid.uuid4()),
            session_id=session_id,
            parent_id=parent_id,
            role=checks.check_role("The role", role),
            content=checks.check_text("The message", content),
            token_ids=checks.check_token_ids("token_ids", token_ids),
            status=checks.check_status("The status", status),
            finish_reason=None,
            error=None,
            params=checks.parse_json(checks.check_json("params", params or {})),
            model=checks.check_optional_text("The model's name", model),
            created_at=now,
        )
        with self._database.write() as db:
            tree.find_session(db, session_id)
            if parent_id is not None:
                tree.find_message(db, parent_id, session_id)
            rows.insert_messages(db, [message])
            rows.update(db, "sessions", session_id, {"head_id": message.id, "updated_at": now})
        return message

    def update_message(
        self,
        message_id: str,
        *,
        content: str | _Unchanged = UNCHANGED,
        token_ids: Sequence[int] | _Unchanged | None = UNCHANGED,
        status: str | _Unchanged = UNCHANGED,
        finish_reason: str | _Unchanged | None = UNCHANGED,
        error: str | _Unchanged | None = UNCHANGED,
    ) -> None:
        """Store how far a reply has come. The session counts as updated once the status is given and not PARTIAL."""
        values: dict[str, Any] = {}
        if content is not UNCHANGED:
            values["content"] = checks.check_text("The message", content)
        if token_ids is not UNCHANGED:
            values["token_ids"] = rows.pack_ids(checks.check_token_ids("token_ids", token_ids))
        if status is not UNCHANGED:
            values["status"] = checks.check_status("The status", status)
        if finish_reason is not UNCHANGED:
            values["finish_reason"] = checks.check_optional_text("The finish reason", finish_reason)
        if error is not UNCHANGED:
            values["error"] = checks.check_optional_text("The error", error)
        with self._database.write() as db:
            message = tree.find_message(db, message_id)
            rows.update(db, "messages", message_id, values)
            if values.get("status", PARTIAL) != PARTIAL:
                rows.update(db, "sessions", message.session_id, {"updated_at": rows.utc(self._clock())})

    def set_head(self, session_id: str, message_id: str | None) -> None:
        """Make the branch that ends at a message the current one; None shows an empty chat."""
        self.update(session_id, head_id=message_id)

    def delete_message(self, message_id: str) -> None:
        """Remove a message and everything below it.

        If the current branch ran through it, the newest remaining version of the message takes its place, followed
        down to its newest leaf; where there is none, the branch ends at the message's parent.
        """
        with self._database.write() as db:
            message = tree.find_message(db, message_id)
            session = tree.find_session(db, message.session_id)
            values: dict[str, Any] = {"updated_at": rows.utc(self._clock())}
            if session.head_id in tree.subtree_ids(db, message_id):
                others = [other for other in tree.sibling_ids(db, message) if other != message_id]
                values["head_id"] = tree.newest_leaf(db, others[-1]) if others else message.parent_id
            tree.delete_subtree(db, message_id)
            rows.update(db, "sessions", session.id, values)

    def copy_branch(self, session_id: str, upto_message_id: str | None = None, title: str | None = None) -> Session:
        """A new session with copies of the messages from the first to `upto_message_id` (None: the head).

        Settings, system prompt and prompt date are kept, so its prompt starts with the same tokens. A reply that is
        still streaming is copied as far as it is stored, as INTERRUPTED. Turn numbers stay with the original.
        """
        now = rows.utc(self._clock())
        with self._database.write() as db:
            source = tree.find_session(db, session_id)
            last = source.head_id
            if upto_message_id is not None:
                last = tree.find_message(db, upto_message_id, session_id).id
            path = tree.path_to(db, last) if last is not None else ()
            kept = source.first_kept_id if any(item.id == source.first_kept_id for item in path) else None
            name = checks.check_title(title) if title is not None else _fork_title(source.title)
            original = replace(source, title=name, head_id=last, first_kept_id=kept, created_at=now, updated_at=now)
            fork = export.with_new_ids(export.SessionTree(original, tuple(map(_interrupted, path)), ()))
            whole.insert(db, fork)
        return fork.session

    # Export and import

    def export(self, session_id: str) -> dict[str, Any]:
        """The whole session, all branches, as plain JSON values (see `sessions.export`)."""
        with self._database.read() as db:
            session = tree.find_session(db, session_id)
            sql = "SELECT * FROM messages WHERE session_id = ? ORDER BY seq"
            messages = tuple(rows.message_from(row) for row in list(db.query(sql, [session_id])))
            turns, inputs = whole.turns(db, session_id), whole.inputs(db, session_id)
        return export.to_json(export.SessionTree(session, messages, turns, inputs))

    def export_markdown(self, session_id: str) -> str:
        """The current branch as a Markdown document."""
        with self._database.read() as db:
            session = tree.find_session(db, session_id)
            return export.to_markdown(session, _branch(db, session))

    def import_(self, data: Mapping[str, Any]) -> Session:
        """Store an export. Ids are kept, or all made new if any of them is stored here already."""
        imported = export.from_json(data)
        with self._database.write() as db:
            if whole.any_stored(db, imported):
                imported = export.with_new_ids(imported)
            whole.insert(db, imported)
        return imported.session

    def _recover(self) -> int:
        # The file is locked to this process and nothing runs yet: whoever was writing these replies is gone.
        with self._database.write() as db:
            sql = "UPDATE messages SET status = ?, finish_reason = ? WHERE status = 'partial'"
            return db.execute(sql, [COMPLETE, INTERRUPTED]).rowcount


def _fork_title(title: str) -> str:
    return title[: checks.MAX_TITLE - len(FORK_SUFFIX)] + FORK_SUFFIX


def _interrupted(message: Message) -> Message:
    return replace(message, status=COMPLETE, finish_reason=INTERRUPTED) if message.status == PARTIAL else message


def _branch(db: Database, session: Session) -> Branch:
    return Branch(()) if session.head_id is None else tree.branch_to(db, session.id, session.head_id)
