from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sessions.models import COMPLETE, INTERRUPTED, PARTIAL
from sessions.store import SessionStore, StoreError
from tests.support.session_store import check_integrity, sample_session

ROOT = Path(__file__).parents[2]
STREAM = """
import sys
from sessions.store import SessionStore
store = SessionStore(sys.argv[1])
session = store.create("killed")
question = store.add_message(session.id, None, "user", "count")
reply = store.add_message(session.id, question.id, "assistant", "", status="partial", model="tiny", params={"seed": 5})
print(session.id, flush=True)
for count in range(1, 100_000):
    ids = range(count)
    store.update_message(reply.id, content=" ".join(map(str, ids)), token_ids=ids)
    print(count, flush=True)
"""
FILE_SIZE_LIMIT = """
import resource, sys
from sessions.store import SessionStore, StoreError
store = SessionStore(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
stored = 0
try:
    while True:
        store.create("filler", "x" * 20_000)
        stored += 1
except StoreError as error:
    print(stored, error)
"""


def open_pages(store: SessionStore, extra: int | None) -> None:
    """Let this thread's connection grow by so many pages, as on a disk that is full then; None: without limit."""
    with store._database.read() as db:
        count = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {count + extra if extra is not None else 2**30}").fetchone()


@pytest.mark.parametrize("after", [1, 60])
def test_a_killed_process_loses_at_most_the_state_being_written(path: Path, after: int) -> None:
    command = [sys.executable, "-c", STREAM, str(path)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    session_id = child.stdout.readline().strip()
    count = 0
    while count < after:
        count = int(child.stdout.readline())
    child.kill()
    rest = child.communicate()[0].split()
    count = int(rest[-1]) if rest else count
    store = SessionStore(path)
    assert store.recovered == 1
    question, reply = store.branch(session_id).messages
    assert (question.content, question.status) == ("count", COMPLETE)
    assert (reply.status, reply.finish_reason, reply.model, reply.params) == (
        COMPLETE,
        INTERRUPTED,
        "tiny",
        {"seed": 5},
    )
    assert len(reply.token_ids) in (count, count + 1)
    assert reply.content == " ".join(map(str, reply.token_ids)), "text and ids are from the same moment"
    assert store.list("killed")[0].message_count == 2
    store.add_message(session_id, reply.id, "user", "go on")
    check_integrity(store)
    store.close()


def test_only_unfinished_replies_are_recovered(path: Path) -> None:
    store = SessionStore(path)
    session = sample_session(store)
    before = store.export(session.id)
    reply = store.add_message(session.id, session.head_id, "assistant", "so fa", status=PARTIAL)
    store.close()
    store = SessionStore(path)
    assert store.recovered == 1
    after = store.export(session.id)
    assert after["messages"][:-1] == before["messages"]
    recovered = store.message(reply.id)
    assert (recovered.content, recovered.status, recovered.finish_reason) == ("so fa", COMPLETE, INTERRUPTED)
    assert len(store.list("so fa")) == 1
    store.close()
    store = SessionStore(path)
    assert store.recovered == 0
    store.close()


def test_a_full_disk_gets_one_sentence_and_nothing_stored_is_lost(store: SessionStore) -> None:
    session = sample_session(store)
    reply = store.add_message(session.id, session.head_id, "assistant", "short", status=PARTIAL)
    large = store.create("large", "y" * 200_000)
    before = [store.export(session.id), store.export(large.id)]
    copy = {**before[1], "session": {**before[1]["session"], "system_prompt": "z" * 500_000}}
    open_pages(store, 1)
    calls = (
        lambda: store.create("new", "x" * 100_000),
        lambda: store.add_message(session.id, reply.id, "user", "x" * 100_000),
        lambda: store.update_message(reply.id, content="x" * 100_000, status=COMPLETE),
        lambda: store.update(session.id, system_prompt="x" * 100_000),
        lambda: store.copy_branch(large.id),
        lambda: store.import_(copy),
    )
    for call in calls:
        with pytest.raises(StoreError, match="disk is full") as caught:
            call()
        assert "/" not in str(caught.value)
        assert [store.export(session.id), store.export(large.id)] == before
        assert len(store.list()) == 2
    open_pages(store, None)
    for call in calls:
        call()
    check_integrity(store)


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are a POSIX facility")
def test_a_write_that_the_system_refuses_gets_one_sentence(path: Path) -> None:
    """A real refused write to the log file, as on a full disk or at a quota, in place of SQLite's own limit."""
    result = subprocess.run(
        [sys.executable, "-c", FILE_SIZE_LIMIT, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    count, sentence = result.stdout.strip().split(" ", 1)
    assert int(count) > 0 and "disk" in sentence and sentence.endswith(("unplugged?", "unchanged."))
    assert result.stderr == ""
    store = SessionStore(path)
    assert len(store.list()) == int(count)
    check_integrity(store)
    store.close()
