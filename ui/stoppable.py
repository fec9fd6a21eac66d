"""Long work on a session that a person may stop: one piece of a kind at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import Conflict


class Stoppable:
    """Which sessions such work runs for now. Thread-safe."""

    def __init__(self, busy: str) -> None:
        """`busy`: the sentence for who asks for it a second time meanwhile."""
        self._busy = busy
        self._running: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    @contextmanager
    def claim(self, session_id: str) -> Iterator[threading.Event]:
        """Set as soon as the work is to end. Raises `Conflict`."""
        with self._lock:
            if session_id in self._running:
                raise Conflict(self._busy)
            self._running[session_id] = stopped = threading.Event()
        try:
            yield stopped
        finally:
            with self._lock:
                del self._running[session_id]

    def stop(self, session_id: str) -> bool:
        """End the session's work, if some runs; False if none did."""
        with self._lock:
            running = self._running.get(session_id)
        if running is not None:
            running.set()
        return running is not None
