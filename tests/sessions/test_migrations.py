from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from sessions import migrations
from sessions.errors import StoreError
from sessions.store import SessionStore
from tests.support.session_store import check_integrity

NAMES = [step.__name__ for step in migrations.STEPS]


def connect(path: Path) -> Database:
    return Database(sqlite3.connect(path, timeout=10, isolation_level=None), execute_plugins=False)


def applied(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as conn:
        return [row[0] for row in conn.execute("SELECT name FROM migrations ORDER BY rowid")]


def test_each_step_is_applied_once_in_order(path: Path) -> None:
    db = connect(path)
    assert list(migrations.migrate(db)) == NAMES
    assert migrations.migrate(db) == ()
    assert applied(path) == NAMES
    db.close()


def test_an_older_schema_with_chats_in_it_is_brought_up_to_date(path: Path) -> None:
    """Before the second step there was no search index: what was written then has to be found afterwards."""
    db = connect(path)
    migrations.migrate(db, migrations.STEPS[:1])
    at = "2026-01-01T00:00:00.000000+00:00"
    db.table("sessions").insert(
        {
            "id": "s",
            "title": "Old title",
            "system_prompt": "",
            "params": "{}",
            "created_at": at,
            "updated_at": at,
            "prompt_date": at,
        }
    )
    for name, parent, status in (("m", None, "complete"), ("n", "m", "partial")):
        db.table("messages").insert(
            {
                "id": name,
                "session_id": "s",
                "parent_id": parent,
                "role": "user",
                "content": f"old words {name}",
                "status": status,
                "params": "{}",
                "created_at": at,
            }
        )
    db.close()
    store = SessionStore(path)
    assert applied(path) == NAMES
    assert [item.title for item in store.list("old words")] == ["Old title"]
    assert len(store.list("words n")) == 1, "the interrupted reply too"
    assert len(store.list("title")) == 1
    assert store.recovered == 1
    check_integrity(store)
    store.close()


@pytest.mark.parametrize("later", ["m999_from_the_future", "m000_sorts_before_ours"])
def test_a_newer_database_is_refused_and_left_alone(path: Path, later: str) -> None:
    SessionStore(path).close()
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("INSERT INTO migrations VALUES (?, '')", [later])
    for _ in range(2):
        with pytest.raises(StoreError, match="newer version"):
            SessionStore(path)
    assert applied(path) == [*NAMES, later]


def test_a_step_that_fails_leaves_nothing_behind(path: Path) -> None:
    def m003_fails(db: Database) -> None:
        db.execute("CREATE TABLE half (x)")
        db.execute("INSERT INTO nowhere VALUES (1)")

    db = connect(path)
    with pytest.raises(sqlite3.OperationalError):
        migrations.migrate(db, (*migrations.STEPS, m003_fails))
    assert applied(path) == NAMES
    assert not db.table("half").exists()
    db.close()
    SessionStore(path).close()


def numbered(number: int) -> migrations.Step:
    """A step that does not notice having been applied before: a second time would add a second row."""

    def step(db: Database) -> None:
        db.execute("CREATE TABLE IF NOT EXISTS counted (number)")
        db.execute("INSERT INTO counted VALUES (?)", [number])

    step.__name__ = f"m{number:03}_numbered"
    return step


def test_connections_that_migrate_at_once_do_not_collide(tmp_path: Path) -> None:
    numbers = range(len(NAMES) + 1, 23)
    steps = (*migrations.STEPS, *map(numbered, numbers))
    for attempt in range(3):
        path = tmp_path / f"{attempt}.db"
        barrier = threading.Barrier(4)
        done: list[str] = []

        def work(path: Path = path, barrier: threading.Barrier = barrier, done: list[str] = done) -> None:
            db = connect(path)
            barrier.wait()
            migrations.check_owner(db)
            done.extend(migrations.migrate(db, steps))
            db.close()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == applied(path) == [step.__name__ for step in steps]
        with closing(sqlite3.connect(path)) as conn:
            assert conn.execute("SELECT number FROM counted ORDER BY rowid").fetchall() == [(n,) for n in numbers]


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("CREATE TABLE precious (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        SessionStore(path)
    assert path.read_bytes() == before


def test_files_that_are_no_database_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("These are notes, not a database. " * 100)
    for path in (text, tmp_path, text / "below.db"):
        with pytest.raises(StoreError) as caught:
            SessionStore(path)
        assert "/" not in str(caught.value) and str(caught.value).endswith(".")
    assert text.read_text() == "These are notes, not a database. " * 100
