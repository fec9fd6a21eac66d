from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from sessions.models import COMPLETE, PARTIAL
from sessions.store import NotStored, SessionStore, StoreError
from tests.support.session_store import check_integrity, sample_session

ROOT = Path(__file__).parents[2]
OPEN_AND_HOLD = """
import sys
from sessions.store import SessionStore, StoreError
try:
    store = SessionStore(sys.argv[1])
except StoreError as error:
    print(error)
else:
    print("opened", flush=True)
    sys.stdin.read()
    store.close()
"""


def run_threads(*works: Callable[[], None]) -> None:
    """Run all at once and raise the first error of any of them."""
    barrier = threading.Barrier(len(works))
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_many_threads_on_one_session_lose_and_double_nothing(store: SessionStore) -> None:
    """Two tabs, API calls and an edit at the same moment: every row once, none half, no lock error."""
    session = store.create()
    root = store.add_message(session.id, None, "user", "root")

    def talk(name: str) -> Callable[[], None]:
        def work() -> None:
            parent = root.id
            for number in range(15):
                reply = store.add_message(session.id, parent, "assistant", "", status=PARTIAL)
                for length in range(1, 4):
                    store.update_message(reply.id, content=f"{name} " * length, token_ids=range(length))
                text = f"{name} round {number}"
                store.update_message(reply.id, content=text, status=COMPLETE, finish_reason="stop")
                store.add_turn(session.id, reply.id, "tiny", {"round": number})
                store.list(name)
                branch = store.branch(session.id)
                assert [m.parent_id for m in branch.messages] == [None, *(m.id for m in branch.messages[:-1])]
                assert all(m.id in branch.siblings[m.id] for m in branch.messages)
                parent = reply.id

        return work

    names = [f"thread{number}" for number in range(6)]
    run_threads(*(talk(name) for name in names))
    data = store.export(session.id)
    contents = [item["content"] for item in data["messages"][1:]]
    assert sorted(contents) == sorted(f"{name} round {number}" for name in names for number in range(15))
    assert {item["status"] for item in data["messages"]} == {COMPLETE}
    assert len(data["turns"]) == len({item["message_id"] for item in data["turns"]}) == 90
    check_integrity(store)


def test_reading_while_branches_are_deleted_sees_whole_states(store: SessionStore) -> None:
    session = store.create()
    root = store.add_message(session.id, None, "user", "root")

    def write() -> None:
        for _ in range(40):
            first = store.add_message(session.id, root.id, "assistant", "a")
            store.add_message(session.id, first.id, "user", "b")
            store.delete_message(first.id)

    def read() -> None:
        for _ in range(80):
            assert [m.content for m in store.branch(session.id).messages] in (
                ["root"],
                ["root", "a"],
                ["root", "a", "b"],
            )
            data = store.export(session.id)
            assert data["session"]["head_id"] in {item["id"] for item in data["messages"]}

    run_threads(write, read, read)
    check_integrity(store)


def test_deleting_a_session_under_a_writer_ends_in_not_stored(store: SessionStore) -> None:
    session = store.create()
    started = threading.Event()

    def write() -> None:
        with pytest.raises(NotStored):
            while True:
                store.add_message(session.id, None, "user", "x")
                started.set()

    def delete() -> None:
        started.wait()
        store.delete(session.id)

    run_threads(write, write, delete)
    assert store.list() == []
    check_integrity(store)


def test_threads_that_ended_leave_no_open_files(store: SessionStore, path: Path) -> None:
    """Each reply has a recorder thread of its own; their connections must not pile up."""
    for _ in range(30):
        run_threads(lambda: store.create() and None)
    opened = [file for file in psutil.Process().open_files() if Path(file.path) == path.resolve()]
    assert 0 < len(opened) < 10
    assert len(store.list()) == 30


def test_closing_under_running_threads_breaks_nothing(path: Path) -> None:
    store = SessionStore(path)
    session = store.create()
    stored: list[str] = []

    def work() -> None:
        with pytest.raises(StoreError, match="closed"):
            while True:
                stored.append(store.add_message(session.id, None, "user", "x").id)
                store.branch(session.id)

    def close() -> None:
        while len(stored) < 20:
            time.sleep(0.001)
        store.close()

    run_threads(work, work, work, close)
    store = SessionStore(path)
    assert {item["id"] for item in store.export(session.id)["messages"]} == set(stored)
    check_integrity(store)
    store.close()


def test_a_locked_database_is_waited_for(store: SessionStore, path: Path) -> None:
    locked = threading.Event()

    def hold() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            locked.set()
            time.sleep(0.3)
            other.execute("COMMIT")

    def write() -> None:
        locked.wait()
        store.create("waited")

    run_threads(hold, write)
    assert [item.title for item in store.list()] == ["waited"]


def test_a_database_that_stays_locked_gets_one_sentence(path: Path) -> None:
    store = SessionStore(path, busy_timeout_s=0.1)
    session = store.create("kept")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked by another program"):
            store.create()
        with pytest.raises(StoreError, match="locked by another program"):
            store.add_message(session.id, None, "user", "x")
        assert store.get(session.id) == session, "reading goes on"
        other.execute("ROLLBACK")
    store.add_message(session.id, None, "user", "x")
    assert [item.message_count for item in store.list()] == [1]
    store.close()


def test_a_second_store_on_the_file_is_refused(store: SessionStore, path: Path) -> None:
    reply = store.add_message(store.create().id, None, "assistant", "still", status=PARTIAL)
    with pytest.raises(StoreError, match="Another running KVScope"):
        SessionStore(path)
    assert store.message(reply.id).status == PARTIAL, "a live reply is not taken for a crashed one"
    store.update_message(reply.id, content="still here", status=COMPLETE)


def test_of_processes_that_open_at_once_exactly_one_gets_the_store(path: Path) -> None:
    command = [sys.executable, "-c", OPEN_AND_HOLD, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(3)]
    lines = [child.stdout.readline().strip() for child in children]
    for child in children:
        child.communicate("")
    assert lines.count("opened") == 1
    assert sum(line.startswith("Another running KVScope") for line in lines) == 2
    store = SessionStore(path)
    sample_session(store)
    store.close()
