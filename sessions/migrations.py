"""The schema as a list of named steps. Each is applied once, in order, and recorded in the table `migrations`.

A released step is never changed: a new schema is a new step at the end. Steps run inside a transaction, together with
their record, so a killed process leaves the schema before a step or after it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from sqlite_utils import Database

from sessions.errors import StoreError

APPLICATION_ID = 0x4B565343
"""Marks a SQLite file as a KVScope database ("KVSC"), so that another program's file is never altered."""

Step = Callable[[Database], None]


def m001_sessions_messages_turns(db: Database) -> None:
    """`seq` numbers give the order of creation: a parent's is always lower than its children's.

    `token_ids` are little-endian int32, NULL where unknown; `params` and `stats` are JSON objects. Deleting a parent
    does not cascade to its children: the depth of a chat may exceed SQLite's limit of nested cascades (1000).
    """
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.executescript("""
        CREATE TABLE sessions (
            seq INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            title TEXT NOT NULL,
            system_prompt TEXT NOT NULL,
            params TEXT NOT NULL,
            head_id TEXT REFERENCES messages(id) ON DELETE SET NULL,
            first_kept_id TEXT REFERENCES messages(id) ON DELETE SET NULL,
            created_at TEXT NOT NULL,
            updated_at TEXT NOT NULL,
            prompt_date TEXT NOT NULL
        );
        CREATE INDEX sessions_updated ON sessions(updated_at);
        CREATE INDEX sessions_head ON sessions(head_id);
        CREATE INDEX sessions_first_kept ON sessions(first_kept_id);

        CREATE TABLE messages (
            seq INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
            parent_id TEXT REFERENCES messages(id),
            role TEXT NOT NULL,
            content TEXT NOT NULL,
            token_ids BLOB,
            status TEXT NOT NULL CHECK (status IN ('partial', 'complete', 'failed')),
            finish_reason TEXT,
            error TEXT,
            params TEXT NOT NULL,
            model TEXT,
            created_at TEXT NOT NULL
        );
        CREATE INDEX messages_session ON messages(session_id, parent_id);
        CREATE INDEX messages_parent ON messages(parent_id);
        CREATE INDEX messages_partial ON messages(status) WHERE status = 'partial';

        CREATE TABLE turns (
            seq INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
            message_id TEXT NOT NULL REFERENCES messages(id) ON DELETE CASCADE,
            model TEXT NOT NULL,
            stats TEXT NOT NULL,
            created_at TEXT NOT NULL
        );
        CREATE INDEX turns_session ON turns(session_id);
        CREATE INDEX turns_message ON turns(message_id);
    """)


def m002_full_text_search(db: Database) -> None:
    """Trigrams find any substring of three characters or more, in every script.

    Replies are indexed when they are complete: indexing each partial state again would cost the square of the length.
    """
    db.executescript("""
        CREATE VIRTUAL TABLE messages_fts USING fts5(content, content='messages', content_rowid='seq',
                                                     tokenize='trigram');
        INSERT INTO messages_fts(rowid, content) SELECT seq, content FROM messages WHERE status <> 'partial';
        CREATE TRIGGER messages_fts_insert AFTER INSERT ON messages WHEN new.status <> 'partial' BEGIN
            INSERT INTO messages_fts(rowid, content) VALUES (new.seq, new.content);
        END;
        CREATE TRIGGER messages_fts_delete AFTER DELETE ON messages WHEN old.status <> 'partial' BEGIN
            INSERT INTO messages_fts(messages_fts, rowid, content) VALUES ('delete', old.seq, old.content);
        END;
        CREATE TRIGGER messages_fts_leave BEFORE UPDATE OF content, status ON messages
        WHEN old.status <> 'partial' BEGIN
            INSERT INTO messages_fts(messages_fts, rowid, content) VALUES ('delete', old.seq, old.content);
        END;
        CREATE TRIGGER messages_fts_enter AFTER UPDATE OF content, status ON messages
        WHEN new.status <> 'partial' BEGIN
            INSERT INTO messages_fts(rowid, content) VALUES (new.seq, new.content);
        END;

        CREATE VIRTUAL TABLE sessions_fts USING fts5(title, content='sessions', content_rowid='seq',
                                                     tokenize='trigram');
        INSERT INTO sessions_fts(rowid, title) SELECT seq, title FROM sessions;
        CREATE TRIGGER sessions_fts_insert AFTER INSERT ON sessions BEGIN
            INSERT INTO sessions_fts(rowid, title) VALUES (new.seq, new.title);
        END;
        CREATE TRIGGER sessions_fts_delete AFTER DELETE ON sessions BEGIN
            INSERT INTO sessions_fts(sessions_fts, rowid, title) VALUES ('delete', old.seq, old.title);
        END;
        CREATE TRIGGER sessions_fts_leave BEFORE UPDATE OF title ON sessions BEGIN
            INSERT INTO sessions_fts(sessions_fts, rowid, title) VALUES ('delete', old.seq, old.title);
        END;
        CREATE TRIGGER sessions_fts_enter AFTER UPDATE OF title ON sessions BEGIN
            INSERT INTO sessions_fts(rowid, title) VALUES (new.seq, new.title);
        END;
    """)


def m003_token_measures(db: Database) -> None:
    """What was measured of a reply's first tokens while they were sampled; `data` is as `rows.pack_measures` makes it.
    `kv_format` is how the cache kept what the reply was sampled from.

    A table of its own: a chat is read with all of its messages, and rarely with these.
    """
    db.executescript("""
        CREATE TABLE token_measures (
            message_id TEXT PRIMARY KEY REFERENCES messages(id) ON DELETE CASCADE,
            kv_format TEXT NOT NULL,
            data BLOB NOT NULL
        );
    """)


def m004_turn_inputs(db: Database) -> None:
    """What each reply was made from, for replay. `prompt_ids` are little-endian int32, deflated; the rest is JSON."""
    db.executescript("""
        CREATE TABLE turn_inputs (
            message_id TEXT PRIMARY KEY REFERENCES messages(id) ON DELETE CASCADE,
            prompt_ids BLOB NOT NULL,
            kv_format TEXT NOT NULL,
            beams TEXT NOT NULL,
            fingerprint TEXT NOT NULL
        );
    """)


STEPS: tuple[Step, ...] = (
    m001_sessions_messages_turns,
    m002_full_text_search,
    m003_token_measures,
    m004_turn_inputs,
)


def check_owner(db: Database) -> None:
    """Refuse a SQLite file that some other program made, before anything in it is changed."""
    # Tables first: a file that another process fills between the two questions already has its mark at the second.
    has_tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
    if has_tables and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise StoreError("The session database file belongs to another program.")


def migrate(db: Database, steps: tuple[Step, ...] = STEPS) -> tuple[str, ...]:
    """Apply the steps that are missing and return their names. Safe when several processes do so at once.

    Raises `StoreError` if the database knows steps that this program does not.
    """
    done = []
    for number, step in enumerate(steps):
        db.execute("BEGIN IMMEDIATE")
        try:
            db.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied_at TEXT NOT NULL)")
            applied = [row[0] for row in db.execute("SELECT name FROM migrations ORDER BY rowid").fetchall()]
            _check_known(applied, steps)
            if number >= len(applied):
                step(db)
                now = datetime.now(UTC).isoformat(timespec="microseconds")
                db.execute("INSERT INTO migrations VALUES (?, ?)", [step.__name__, now])
                done.append(step.__name__)
            db.execute("COMMIT")
        except BaseException:
            if db.conn.in_transaction:
                db.execute("ROLLBACK")
            raise
    return tuple(done)


def _check_known(applied: list[str], steps: tuple[Step, ...]) -> None:
    known = [step.__name__ for step in steps]
    if applied != known[: len(applied)]:
        raise StoreError("The session database was written by a newer version of KVScope; update KVScope to open it.")
