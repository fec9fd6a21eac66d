"""What can go wrong with stored sessions. Every message is one sentence for a person, without file-system paths."""

from __future__ import annotations

import sqlite3


class StoreError(Exception):
    """Sessions can't be read or written: disk full, database locked, damaged, newer, in use, or closed."""


class NotStored(StoreError):
    """The named session or message does not exist, or the message belongs to another session."""


class InvalidData(StoreError):
    """What was to be stored or imported makes no sense; nothing was written."""


BUSY_MESSAGE = "The session database is locked by another program; try again when that program has finished."
CLOSED_MESSAGE = "The session store is closed."

_BY_CODE = {
    sqlite3.SQLITE_BUSY: BUSY_MESSAGE,
    sqlite3.SQLITE_LOCKED: BUSY_MESSAGE,
    sqlite3.SQLITE_FULL: "The disk is full, so nothing more can be stored; what was stored before is unchanged.",
    sqlite3.SQLITE_READONLY: "The session database is read-only, so nothing can be stored.",
    sqlite3.SQLITE_PERM: "The session database may not be opened: permission denied.",
    sqlite3.SQLITE_CANTOPEN: "The session database can't be opened; check the data folder and its permissions.",
    sqlite3.SQLITE_IOERR: "The disk reported an error while sessions were read or written; is it full or unplugged?",
    sqlite3.SQLITE_CORRUPT: "The session database is damaged.",
    sqlite3.SQLITE_NOTADB: "The session database file is not a database.",
    sqlite3.SQLITE_TOOBIG: "The text is too large to be stored.",
}


def result_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code (the low byte of the extended one), 0 where Python itself raised the error."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    """True when the same statement may succeed a moment later."""
    return result_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def explain(error: sqlite3.Error) -> StoreError:
    """The same failure as one sentence for a person; the original belongs in its `__cause__`."""
    return StoreError(_BY_CODE.get(result_code(error), "The session database could not carry out the request."))
