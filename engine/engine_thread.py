"""The thread that owns model, cache and schedule, and the mailbox in front of it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from engine.config import EngineConfig
from engine.errors import EngineBusy, EngineStopped
from engine.jobs import Slices
from engine.lanes import Lanes
from engine.loader import EngineParts, load_parts
from engine.step_loop import StepLoop

T = TypeVar("T")
CALL_S = 60.0
JOB_S = 600.0
log = logging.getLogger("kvscope.engine")


class EngineThread:
    """Loads the model, then runs steps and, between them, what was put into its mailbox."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], EngineParts] = load_parts) -> None:
        self._config = config
        self._load = load
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._state = "loading"
        self._failure: BaseException | None = None
        self._parts: EngineParts | None = None
        self._lanes: Lanes | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvscope-engine", daemon=True)

    def _first_loop(self, parts: EngineParts) -> StepLoop:
        """The step loop of the engine's own KV format."""
        return StepLoop(parts)

    def _before_turns(self) -> None:
        """On the thread, once the model is loaded."""

    def _before_end(self) -> None:
        """On the thread, once all turns have ended because the engine is closed."""

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the first turn can run. Raises what the load raised, or `EngineStopped` on time-out."""
        finished = self._ready.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        if not finished:
            raise EngineStopped("The model is still loading.")

    def status(self) -> str:
        """ "loading", "ok" or "stopped"."""
        return self._state

    def _run(self) -> None:
        try:
            self._parts = self._load(self._config)
            self._lanes = Lanes(self._first_loop(self._parts))
            self._steps().fingerprint()  # its digests are computed once: now, and not within the first turn
            self._before_turns()
        except BaseException as error:
            self._failure = error
            self._state = "stopped"
            self._ready.set()
            return
        self._state = "ok"
        self._ready.set()
        try:
            # Also commands from the mailbox touch the cache's tensors, so the whole thread runs in this mode.
            with torch.inference_mode():
                while not self._closing:
                    self._drain_mailbox(wait=not self._lanes.has_work)
                    self._lanes.step()
            self._stop("The engine was closed.")
        except BaseException as error:
            log.exception("the engine loop failed")
            self._stop(f"The engine stopped after an unexpected error ({type(error).__name__}); restart KVScope.")

    def _drain_mailbox(self, wait: bool) -> None:
        if wait:
            self._mailbox.get()()
        while True:
            try:
                command = self._mailbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _stop(self, sentence: str) -> None:
        """No request may wait for ever: every open stream and queued command learns that this is the end.

        Turns end as cancelled when the engine was closed on purpose, else with an error."""
        self._state = "stopped"
        cancelled = self._closing
        self._all().end_all(None if cancelled else EngineStopped(sentence))
        if cancelled:
            self._before_end()
        while not self._mailbox.empty():
            self._mailbox.get()()

    def _post(self, command: Callable[[], None]) -> None:
        self._mailbox.put(command)
        if self._state == "stopped" and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
            self._drain_mailbox(wait=False)

    def _call(self, function: Callable[[], T]) -> T:
        """Run on the engine thread between two steps and hand the result, or the exception, to the caller."""
        self._need_parts()
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._post(command)
        return future.result(timeout=CALL_S)

    def _run_job(self, slices: Slices[T]) -> T:
        """Run on the engine thread, a slice after each step."""
        future: Future[T] = Future()
        self._post(lambda: self._steps().jobs.add(slices, future))
        try:
            return future.result(timeout=JOB_S)
        except TimeoutError:
            future.cancel()
            raise EngineBusy("The engine had no time for this; try again when fewer replies are running.") from None

    def _need_parts(self) -> EngineParts:
        if self._parts is None or self._state == "loading":
            raise EngineStopped(
                "The model is still loading." if self._state == "loading" else "The engine has stopped."
            )
        if self._state == "stopped":
            raise EngineStopped("The engine has stopped; restart KVScope.")
        return self._parts

    def _all(self) -> Lanes:
        assert self._lanes is not None
        return self._lanes

    def _steps(self, session_id: str | None = None) -> StepLoop:
        """The lane of a session, or that of the engine's own format."""
        return self._all().of(session_id)
