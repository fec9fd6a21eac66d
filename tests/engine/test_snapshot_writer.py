"""The thread that writes snapshots: the newest state of each session, whatever came in between."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from engine.kv_cache.durable import write_durably
from engine.kv_cache.snapshot import SnapshotStore
from engine.kv_cache.snapshot_writer import SnapshotWriter
from tests.support.snapshots import FINGERPRINT, holds, job, new_session

A, B, C = new_session(1), new_session(2), new_session(3)


class Gate:
    """Writes that wait for `open`, and fail while `full`."""

    def __init__(self) -> None:
        self.open, self.begun, self.full = threading.Event(), threading.Event(), False
        self.open.set()

    def write(self, path: Path, data: bytes) -> None:
        self.begun.set()
        assert self.open.wait(10)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_durably(path, data)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def writer(tmp_path: Path, gate: Gate):
    failed: list[tuple[str, bool]] = []
    opened = SnapshotWriter(SnapshotStore(tmp_path, 2**20, gate.write), lambda *what: failed.append(what))
    opened.failed = failed  # type: ignore[attr-defined]
    yield opened
    gate.open.set()
    opened.close(10)


def hold(writer: SnapshotWriter, gate: Gate) -> None:
    """Let the writer be in the middle of a write of session C."""
    gate.open.clear()
    writer.submit(job(C, "x"))
    assert gate.begun.wait(10)


def test_jobs_of_a_session_that_wait_become_one_with_all_that_they_brought(writer: SnapshotWriter, gate: Gate) -> None:
    hold(writer, gate)
    writer.submit(job(A, "abcx"))
    writer.submit(job(A, "abcdey", new="dey"))
    writer.submit(job(A, "abcfz", new="fz"))
    assert set(writer._jobs[A].new) == set("abcfz"), "what is no longer listed is not written"
    gate.open.set()
    assert writer.wait(A, 10) is None and holds(writer.store.load(A, FINGERPRINT), "abcfz")
    assert len(list((writer.store._folder / A).glob("segment-*"))) == 1 and not writer.failed


def test_closing_writes_what_waits_and_takes_no_more(writer: SnapshotWriter, gate: Gate) -> None:
    hold(writer, gate)
    for session in (A, B):
        writer.submit(job(session, "ab"))
    threading.Timer(0.1, gate.open.set).start()
    writer.close(10)
    assert sorted(writer.store.sizes()) == [A, B, C]
    writer.submit(job(A, "abc", new="c"))
    writer.close()
    assert holds(writer.store.load(A, FINGERPRINT), "ab")


def test_a_session_removed_while_it_waits_or_is_written_is_gone(writer: SnapshotWriter, gate: Gate) -> None:
    hold(writer, gate)
    writer.submit(job(A, "ab"))
    threading.Timer(0.1, gate.open.set).start()
    writer.remove(A)
    writer.remove(C)
    assert writer.wait(A, 10) is None and writer.store.sizes() == {}


def test_waiting_takes_no_longer_than_asked(writer: SnapshotWriter, gate: Gate) -> None:
    hold(writer, gate)
    with pytest.raises(TimeoutError):
        writer.wait(C, 0.05)
    assert writer.wait(A, 0.05) is None, "nothing of this session is under way"


def test_after_a_failure_the_next_job_must_bring_all(writer: SnapshotWriter, gate: Gate, caplog) -> None:
    writer.submit(job(A, "ab"))
    assert writer.wait(A, 10) is None
    gate.full = True
    writer.submit(job(A, "abc", new="c"))
    assert "No space left" in writer.wait(A, 10) and writer.failed == [(A, False)]
    gate.full = False
    writer.submit(job(A, "abcd", new="d"))
    writer.flush(10)
    with pytest.raises(TimeoutError):
        writer.wait(A, 0.05)  # neither written nor failed: all of it was asked for
    assert writer.failed[1:] == [(A, True)]
    assert holds(writer.store.load(A, FINGERPRINT), "ab"), "the old snapshot stays"
    writer.submit(job(A, "abcd"))
    assert writer.wait(A, 10) is None and holds(writer.store.load(A, FINGERPRINT), "abcd")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("end", ["give_up", "remove", "close"])
def test_nobody_waits_for_a_job_that_will_not_come(writer: SnapshotWriter, end: str) -> None:
    writer.submit(job(A, "ab", new="b"))
    writer.flush(10)
    assert writer.failed == [(A, True)]
    {"give_up": writer.give_up, "remove": writer.remove, "close": lambda session: writer.close(10)}[end](A)
    failure = writer.wait(A, 0.1)
    assert failure is None if end == "remove" else "is gone" in failure


def test_what_can_not_be_kept_is_told_once(writer: SnapshotWriter, caplog) -> None:
    writer.store.limit = 1000
    for _ in range(2):
        writer.submit(job(A, "abcdef"))
        assert "larger than the disk space" in writer.wait(A, 10)
    assert len(caplog.records) == 1 and writer.store.sizes() == {}
