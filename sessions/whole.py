"""A session with everything that belongs to it, read and written as one; to be called within a transaction."""

from __future__ import annotations

from sqlite_utils import Database

from sessions import export, rows
from sessions.models import TurnInput, TurnRecord


def turns(db: Database, session_id: str) -> tuple[TurnRecord, ...]:
    sql = "SELECT * FROM turns WHERE session_id = ? ORDER BY seq"
    return tuple(rows.turn_from(row) for row in list(db.query(sql, [session_id])))


def inputs(db: Database, session_id: str) -> tuple[TurnInput, ...]:
    sql = "SELECT i.* FROM turn_inputs i JOIN messages m ON m.id = i.message_id WHERE m.session_id = ? ORDER BY m.seq"
    return tuple(rows.input_from(row) for row in list(db.query(sql, [session_id])))


def insert(db: Database, new: export.SessionTree) -> None:
    session = new.session
    rows.insert_session(db, session)
    rows.insert_messages(db, new.messages)
    rows.insert_turns(db, new.turns)
    rows.insert_inputs(db, new.inputs)
    rows.update(db, "sessions", session.id, {"head_id": session.head_id, "first_kept_id": session.first_kept_id})


def any_stored(db: Database, new: export.SessionTree) -> bool:
    wanted = (("sessions", (new.session,)), ("messages", new.messages), ("turns", new.turns))
    for table, items in wanted:
        for item in items:
            if db.execute(f"SELECT 1 FROM {table} WHERE id = ?", [item.id]).fetchone():
                return True
    return False
