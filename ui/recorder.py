"""Writes a reply to the store while it streams, on a thread of its own, so that neither engine nor page waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from functools import partial

from engine.errors import KVScopeError, StorageFailed
from engine.protocol import EventStream, Failed, Finished, TokenDelta
from sessions.errors import NotStored, StoreError
from sessions.models import COMPLETE, FAILED, TurnInput
from sessions.store import SessionStore
from ui.turn import Turn

SLOW_WRITE_S = 0.05
WAIT_RATIO = 10
RETRY_S = 2.0
RETRIES = 300
log = logging.getLogger("kvscope.recorder")


@dataclass(frozen=True, slots=True)
class MadeBy:
    """What made a reply: the model's name, and what it was made from."""

    model: str
    input: TurnInput


def record(store: SessionStore, turn: Turn, stream: EventStream, made_by: MadeBy, on_done: Callable[[], None]) -> None:
    """Start the thread that feeds `turn` and the store from `stream`; `on_done` runs once the reply is stored."""
    turn.attach(stream)
    thread = threading.Thread(
        target=_run, args=(store, turn, stream, made_by, on_done), name=f"kvscope-turn-{turn.id[:8]}", daemon=True
    )
    thread.start()


def _run(store: SessionStore, turn: Turn, stream: EventStream, made_by: MadeBy, on_done: Callable[[], None]) -> None:
    error: KVScopeError | None = None
    unstored: Callable[[], None] | None = None
    next_store = 0.0
    try:
        for event in stream:
            turn.add(event)
            began = time.monotonic()
            if isinstance(event, TokenDelta) and began >= next_store:
                error = _try(lambda: _store_partial(store, turn))
                # A killed process loses the token being written. But while the database is locked each attempt waits,
                # and the reply must not stand still for most of the time.
                waited = time.monotonic() - began
                next_store = began + waited + (WAIT_RATIO * waited if waited > SLOW_WRITE_S else 0.0)
            elif isinstance(event, Finished | Failed):
                last = partial(_store_last, store, turn, event, made_by)
                error = _try(last)
                unstored = last if error else None
    finally:
        on_done()
        turn.close(error)
    if unstored is not None:
        _keep_trying(unstored)


def _keep_trying(action: Callable[[], None]) -> None:
    """The person was told; the reply is still here, and the disk may have room again, the database be free."""
    for _ in range(RETRIES):
        time.sleep(RETRY_S)
        try:
            return action()
        except NotStored:
            return None
        except StoreError:
            continue


def _store_last(store: SessionStore, turn: Turn, event: Finished | Failed, made_by: MadeBy) -> None:
    if isinstance(event, Finished):
        _store_finished(store, turn, event, made_by)
    else:
        _store_failed(store, turn, event)


def _try(action: Callable[[], None]) -> KVScopeError | None:
    """A full disk must not end the stream: the person still sees the reply, and is told that it was not stored."""
    try:
        action()
    except StoreError as error:
        log.warning("a reply could not be stored: %s", error)
        return StorageFailed(f"The reply could not be stored: {error}")
    return None


def _store_partial(store: SessionStore, turn: Turn) -> None:
    view = turn.view()
    store.update_message(turn.message_id, content=view.text)


def _store_finished(store: SessionStore, turn: Turn, event: Finished, made_by: MadeBy) -> None:
    store.update_message(
        turn.message_id,
        content=event.text,
        token_ids=event.token_ids,
        status=COMPLETE,
        finish_reason=event.stats.finish_reason,
    )
    store.save_input(made_by.input)
    store.add_turn(turn.session_id, turn.message_id, made_by.model, asdict(event.stats))
    measures = turn.measures(event.token_ids)
    if measures:
        store.save_measures(turn.message_id, made_by.input.kv_format, [astuple(measure) for measure in measures])


def _store_failed(store: SessionStore, turn: Turn, event: Failed) -> None:
    store.update_message(
        turn.message_id, content=turn.view().text, status=FAILED, finish_reason="error", error=str(event.error)
    )
