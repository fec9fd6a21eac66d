"""One SQLite file, one connection per thread, short transactions, and failures that a person can read."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlite_utils import Database

from sessions.errors import BUSY_MESSAGE, CLOSED_MESSAGE, StoreError, explain, is_busy
from sessions.lockfile import FileLock
from sessions.migrations import check_owner, migrate

RETRY_PAUSE_S = 0.01


@dataclass(slots=True, eq=False)
class _Connection:
    """`lock` is held while the owning thread is inside a transaction, so that `close` never pulls it away."""

    db: Database
    thread: threading.Thread
    lock: threading.RLock = field(default_factory=threading.RLock)


class SessionDatabase:
    """Opens the file at `path` for this process alone and brings its schema up to date.

    `busy_timeout_s` bounds every wait for a lock. Safe from any thread.
    """

    def __init__(self, path: Path, busy_timeout_s: float = 10.0) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._local = threading.local()
        self._connections: list[_Connection] = []
        self._guard = threading.Lock()
        # Writers of this process queue here, which is fair; SQLite's own waiting is polling and can starve a thread.
        self._writer = threading.Lock()
        self._closed = False
        self._file_lock = _prepare_file(path)
        try:
            self._open()
        except sqlite3.Error as error:
            self.close()
            raise explain(error) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        db = self._connection().db
        check_owner(db)
        _retry(db.conn, "PRAGMA journal_mode = WAL", self._busy_timeout_s)
        migrate(db)

    @contextmanager
    def read(self) -> Iterator[Database]:
        """A transaction that sees one unchanging state of the database. Fetch all rows before it ends."""
        with self._transaction("BEGIN") as db:
            yield db

    @contextmanager
    def write(self) -> Iterator[Database]:
        """A transaction that is stored as a whole, or not at all if anything is raised inside."""
        if not self._writer.acquire(timeout=self._busy_timeout_s):
            raise StoreError(BUSY_MESSAGE)
        try:
            # IMMEDIATE: a transaction that reads first and then writes could not wait for another writer.
            with self._transaction("BEGIN IMMEDIATE") as db:
                yield db
        finally:
            self._writer.release()

    def close(self) -> None:
        """End all connections once their running transactions are over; later calls raise `StoreError`."""
        with self._guard:
            self._closed = True
            connections, self._connections = self._connections, []
        for connection in connections:
            _close(connection)
        self._file_lock.release()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Database]:
        try:
            connection = self._connection()
            with connection.lock:
                if self._closed:
                    raise StoreError(CLOSED_MESSAGE)
                with _atomic(connection.db.conn, begin, self._busy_timeout_s):
                    yield connection.db
        except sqlite3.Error as error:
            raise explain(error) from error

    def _connection(self) -> _Connection:
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            return connection
        with self._guard:
            if self._closed:
                raise StoreError(CLOSED_MESSAGE)
            # A thread per reply would otherwise leave one open file each.
            ended = [other for other in self._connections if not other.thread.is_alive()]
            self._connections = [other for other in self._connections if other not in ended]
            connection = _Connection(_connect(self._path, self._busy_timeout_s), threading.current_thread())
            self._connections.append(connection)
        for other in ended:
            _close(other)
        self._local.connection = connection
        return connection


def _prepare_file(path: Path) -> FileLock:
    """Chats are private: what has to be created is for this user only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError("The data folder can't be created; check its name and permissions.") from error
    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        path.touch(mode=0o600)
    except OSError as error:
        lock.release()
        raise StoreError("The session database can't be written; check the data folder's permissions.") from error
    return lock


def _connect(path: Path, busy_timeout_s: float) -> Database:
    # Any thread may close it; isolation_level None leaves BEGIN and COMMIT to this module.
    conn = sqlite3.connect(path, timeout=busy_timeout_s, check_same_thread=False, isolation_level=None)
    try:
        db = Database(conn, execute_plugins=False)
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        conn.close()
        raise
    return db


def _close(connection: _Connection) -> None:
    with connection.lock:
        connection.db.close()


@contextmanager
def _atomic(conn: sqlite3.Connection, begin: str, timeout_s: float) -> Iterator[None]:
    _retry(conn, begin, timeout_s)
    try:
        yield
        _retry(conn, "COMMIT", timeout_s)
    except BaseException:
        # A full disk may already have rolled back.
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def _retry(conn: sqlite3.Connection, sql: str, timeout_s: float) -> None:
    """Run a statement that SQLite may refuse at once, without its own waiting, while another process recovers."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            conn.execute(sql)
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_PAUSE_S)
