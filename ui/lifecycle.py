"""How the app starts to answer and how it ends: signals, the line that says it is ready, replies that end first."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import KVScopeError

if TYPE_CHECKING:
    import uvicorn

    from engine.local import LocalEngine
    from ui.chat import ChatService


def on_signals(handler: Callable[..., object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def end_cleanly(*_: object) -> NoReturn:
    """What is being fetched is put away; who asks again does not wait for that."""
    signal.signal(signal.SIGINT, end_at_once)
    sys.exit(0)


def end_at_once(*_: object) -> NoReturn:
    """What is on disk stays whole, as after a crash."""
    os.write(2, b"Interrupted again: KVScope ends at once, and what was not yet stored is lost.\n")
    os._exit(130)


class Start:
    """Waits beside the server until the first chat could be sent, and says so; or ends the server if the load fails."""

    def __init__(self, server: uvicorn.Server, engine: LocalEngine, url: str, open_browser: bool) -> None:
        self._server, self._engine, self._url, self._open_browser = server, engine, url, open_browser
        self.failure: str | None = None

    def begin(self) -> None:
        threading.Thread(target=self._wait, name="kvscope-start", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._engine.wait_ready()
        except KVScopeError as error:
            self.failure = str(error)
        except BaseException as error:
            self.failure = f"The model could not be loaded: {type(error).__name__}."
            logging.getLogger("kvscope").warning("loading failed", exc_info=error)
        if self.failure is not None:
            self._server.should_exit = True
            return
        while not self._server.started and not self._server.should_exit:
            time.sleep(0.02)
        if self._server.should_exit:
            return
        known = self._engine.capabilities()
        gc.freeze()
        gc.enable()
        print(f"KVScope ready: {self._url} (model {known['model']}, device {known['device']})", flush=True)
        if self._open_browser:
            import webbrowser

            webbrowser.open(self._url)


def end_replies_first(server: uvicorn.Server, chat: ChatService) -> None:
    """When the server is told to stop, running replies end first: then all streams end by themselves, complete."""
    shutdown = server.shutdown

    def end_replies() -> None:
        chat.close()
        # A load can't be interrupted, so nobody waits for it.
        if chat.engine.status() != "loading":
            chat.engine.close()

    async def end_then_shutdown(sockets: Any = None) -> None:
        await asyncio.to_thread(end_replies)
        await shutdown(sockets)

    server.shutdown = end_then_shutdown  # type: ignore[method-assign]


def end_at_once_when_asked_again(server: uvicorn.Server) -> None:
    """A second SIGINT does not wait for what the first one began."""
    handle_exit = server.handle_exit

    def handle(number: int, frame: FrameType | None) -> None:
        if server.should_exit and number == signal.SIGINT:
            end_at_once()
        handle_exit(number, frame)

    server.handle_exit = handle  # type: ignore[method-assign]


def finish(start: Start, chat: ChatService) -> NoReturn:
    """Everything is stored: leave at once. Taking torch and the page's modules apart would take seconds."""
    if start.failure is not None:
        print(start.failure, file=sys.stderr)
    chat.store.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if start.failure is None else 2)
