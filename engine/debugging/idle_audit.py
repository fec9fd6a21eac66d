"""An audit that nobody asked for: of a session whose reply repeats itself, while the engine has nothing else to do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from engine.debugging.audit import audit
from engine.jobs import Jobs, Slices
from engine.lane import Lane
from engine.sequence import Status

MOST_TOKENS = 4096
"""Sessions with more are looked at on request: computing them again takes long."""


def audit_when_idle(loop: Lane, session_id: str, jobs: Jobs, busy: Callable[[], bool]) -> None:
    """Queue an audit of an idle session; what it finds is the session's last audit, of scope "loop".

    It waits while turns run (`busy`), and is given up as soon as the session goes on or another job is queued.
    """
    sequence = loop.scheduler.find(session_id)
    if sequence is None or sequence.status is not Status.IDLE or not 0 < sequence.cache_pos <= MOST_TOKENS:
        return
    turn_id = sequence.turn_id

    def wanted() -> bool:
        goes_on = loop.scheduler.find(session_id) is not sequence or sequence.turn_id != turn_id
        return not goes_on and len(jobs) == 1

    jobs.add(_between_turns(audit(loop, loop.parts, session_id, scope="loop"), wanted, busy), Future())


def _between_turns(slices: Slices[object], wanted: Callable[[], bool], busy: Callable[[], bool]) -> Slices[None]:
    done = object()
    while wanted():
        if not busy() and next(slices, done) is done:
            return
        yield
    slices.close()
