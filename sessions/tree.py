"""Walks over the message tree, each one query. All run inside the caller's transaction."""

from __future__ import annotations

from typing import Any

from sqlite_utils import Database

from sessions.errors import NotStored
from sessions.models import Branch, Message, Session
from sessions.rows import message_from, session_from

NO_SESSION = "This session does not exist."
NO_MESSAGE = "This message does not exist."
OTHER_SESSION = "This message does not exist in this session."

_PATH = """
WITH RECURSIVE path(seq, id, parent_id) AS (
    SELECT seq, id, parent_id FROM messages WHERE id = ?
    UNION
    SELECT m.seq, m.id, m.parent_id FROM messages m JOIN path ON m.id = path.parent_id
)
"""

_SUBTREE = """
WITH RECURSIVE subtree(id) AS (
    VALUES (?)
    UNION
    SELECT m.id FROM messages m JOIN subtree ON m.parent_id = subtree.id
)
"""

_NEWEST_CHILDREN = """
WITH RECURSIVE walk(seq) AS (
    SELECT seq FROM messages WHERE id = ?
    UNION
    SELECT (SELECT max(child.seq) FROM messages child JOIN messages here ON child.parent_id = here.id
            WHERE here.seq = walk.seq)
    FROM walk WHERE walk.seq IS NOT NULL
)
SELECT id FROM messages WHERE seq = (SELECT max(seq) FROM walk)
"""


def find_session(db: Database, session_id: str) -> Session:
    """Raises `NotStored`."""
    row = _first(db, "SELECT * FROM sessions WHERE id = ?", session_id)
    if row is None:
        raise NotStored(NO_SESSION)
    return session_from(row)


def find_message(db: Database, message_id: str, session_id: str | None = None) -> Message:
    """Raises `NotStored`, also for a message of another session than `session_id`."""
    row = _first(db, "SELECT * FROM messages WHERE id = ?", message_id)
    if row is None:
        raise NotStored(NO_MESSAGE)
    if session_id is not None and row["session_id"] != session_id:
        raise NotStored(OTHER_SESSION)
    return message_from(row)


def path_to(db: Database, message_id: str) -> tuple[Message, ...]:
    """The messages from the root to this one. A parent's `seq` is lower than its children's, so `seq` orders a path."""
    sql = _PATH + "SELECT m.* FROM path JOIN messages m ON m.seq = path.seq ORDER BY path.seq"
    return tuple(message_from(row) for row in list(db.query(sql, [message_id])))


def branch_to(db: Database, session_id: str, message_id: str) -> Branch:
    """The path to a message, and for each message on it all its siblings in creation order."""
    sql = f"""{_PATH}
        SELECT path.id AS here, sibling.id AS id FROM path
        JOIN messages sibling ON sibling.session_id = ? AND sibling.parent_id IS path.parent_id
        ORDER BY path.seq, sibling.seq
    """
    siblings: dict[str, list[str]] = {}
    for row in list(db.query(sql, [message_id, session_id])):
        siblings.setdefault(row["here"], []).append(row["id"])
    return Branch(path_to(db, message_id), {here: tuple(ids) for here, ids in siblings.items()})


def sibling_ids(db: Database, message: Message) -> tuple[str, ...]:
    """All versions of a message, itself included, in creation order."""
    sql = "SELECT id FROM messages WHERE session_id = ? AND parent_id IS ? ORDER BY seq"
    return tuple(row["id"] for row in list(db.query(sql, [message.session_id, message.parent_id])))


def newest_leaf(db: Database, message_id: str) -> str:
    """Follow the newest child until there is none. Raises `NotStored`."""
    row = _first(db, _NEWEST_CHILDREN, message_id)
    if row is None:
        raise NotStored(NO_MESSAGE)
    return str(row["id"])


def subtree_ids(db: Database, message_id: str) -> frozenset[str]:
    """The message and everything below it."""
    return frozenset(row["id"] for row in list(db.query(_SUBTREE + "SELECT id FROM subtree", [message_id])))


def delete_subtree(db: Database, message_id: str) -> None:
    """One statement, so that parents and children vanish together and no foreign key is ever broken."""
    db.execute(_SUBTREE + "DELETE FROM messages WHERE id IN (SELECT id FROM subtree)", [message_id])


def _first(db: Database, sql: str, key: str) -> dict[str, Any] | None:
    # A key that is no text, or holds half a character, can't be bound and can't be stored either.
    if not isinstance(key, str) or not key.isascii():
        return None
    return next(iter(list(db.query(sql, [key]))), None)
