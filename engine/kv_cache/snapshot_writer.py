"""Writes snapshots on a thread of its own, the newest state of each session only."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from engine.kv_cache.held import SaveJob
from engine.kv_cache.snapshot import MissingBlocks, SnapshotStore, SnapshotTooLarge

log = logging.getLogger("kvscope.snapshots")


class SnapshotWriter:
    """Jobs by session, carried out in order of arrival; a newer job takes the place of one that still waits.

    `on_failed(session_id, again)` is told, on the writer's thread, of a job that could not be carried out: what it
    brought is lost, so that the next one has to bring everything; `again` if that would succeed. After `again` the
    session's state is on its way until such a job has been carried out, or `give_up` says that none will come. Safe
    from any thread.
    """

    def __init__(self, store: SnapshotStore, on_failed: Callable[[str, bool], None]) -> None:
        self.store = store
        self._on_failed = on_failed
        self._jobs: OrderedDict[str, SaveJob] = OrderedDict()
        self._writing: str | None = None
        self._asked_again: set[str] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._told = False
        self._failures: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="kvscope-snapshots", daemon=True)

    def submit(self, job: SaveJob) -> None:
        with self._changed:
            if self._closing:
                return
            if self._thread.ident is None:
                self._thread.start()
            earlier = self._jobs.get(job.session_id)
            self._jobs[job.session_id] = job.after(earlier) if earlier else job
            self._changed.notify_all()

    def wait(self, session_id: str, timeout_s: float) -> str | None:
        """Wait until nothing of this session is left to write; why its last job failed, None if it did not.

        Raises TimeoutError.
        """

        def settled() -> bool:
            under_way = session_id in self._jobs or self._writing == session_id
            return not under_way and (session_id not in self._asked_again or self._closing)

        with self._changed:
            if not self._changed.wait_for(settled, timeout_s):
                raise TimeoutError
            return self._failures.get(session_id)

    def flush(self, timeout_s: float) -> None:
        """Wait until every job so far has been carried out, or for that long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and self._writing is None, timeout_s)

    def give_up(self, session_id: str) -> None:
        """No job that brings everything will come: what `wait` says of the session's last one stands."""
        with self._changed:
            self._asked_again.discard(session_id)
            self._changed.notify_all()

    def remove(self, session_id: str) -> None:
        """Drop what waits of a session, and delete its snapshot."""
        with self._changed:
            self._jobs.pop(session_id, None)
            self._changed.wait_for(lambda: self._writing != session_id)
            self._failures.pop(session_id, None)
            self._asked_again.discard(session_id)
            self._changed.notify_all()
        self.store.remove(session_id)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what waits, then end the thread. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                session_id, job = self._jobs.popitem(last=False)
                self._writing = session_id
            failure, again = self._carry_out(job)
            with self._changed:
                (self._asked_again.add if again else self._asked_again.discard)(session_id)
            if failure is not None:
                self._on_failed(session_id, again)  # before anybody who waits can act on it
            with self._changed:
                self._writing = None
                if failure is None:
                    self._failures.pop(session_id, None)
                else:
                    self._failures[session_id] = failure
                self._changed.notify_all()

    def _carry_out(self, job: SaveJob) -> tuple[str | None, bool]:
        """`(one sentence if it failed, whether the same state would be written if a job brought all of it)`."""
        try:
            self.store.save(job)
        except MissingBlocks:
            return "An earlier write of this session's cache is gone.", True
        except SnapshotTooLarge:
            failure = "This session's cache is larger than the disk space that snapshots may take."
            self._tell(failure)
        except OSError as error:
            failure = f"The cache could not be written to disk: {error.strerror}."
            self._tell(failure)
        except Exception as error:
            log.exception("a snapshot could not be written")
            failure = f"The cache could not be written to disk: {type(error).__name__}."
        else:
            self._told = False
            return None, False
        return failure, False

    def _tell(self, failure: str) -> None:
        """One line, not one for each turn, until a write succeeds again."""
        if not self._told:
            log.warning("%s The chat goes on; after a restart such a session is computed again.", failure)
        self._told = True
