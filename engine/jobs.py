"""Long work beside the turns: advanced by one slice after each step, so that no stream waits for all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.errors import Stopped

T = TypeVar("T")
Slices = Generator[None, None, T]
"""Work that hands the thread back at each `yield`; its result is what it returns."""


def run_through(slices: Slices[T]) -> T:
    """All slices in one go."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


def cancellable(slices: Slices[T], cancelled: Callable[[], bool], what: str) -> Slices[T]:
    """The same work; `Stopped` is raised after the slice in which `cancelled` came true."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
        if cancelled():
            slices.close()
            raise Stopped(f"The {what} was stopped.")
        yield


class Jobs:
    """Jobs in order of arrival; only the first one holds memory. An exception is its job's alone."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Slices[Any], Future[Any]]] = deque()
        self._closed: Exception | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, slices: Slices[T], future: Future[T]) -> None:
        """Queue a job whose result, or exception, `future` gets. A cancelled future ends its job at the next slice."""
        if self._closed is not None:
            future.set_exception(self._closed)
        else:
            self._waiting.append((slices, future))

    def advance(self) -> None:
        """One slice of the first job."""
        slices, future = self._waiting[0]
        try:
            if not future.cancelled():
                next(slices)
                return
        except StopIteration as end:
            future.set_result(end.value)
        except Exception as error:
            future.set_exception(error)
        slices.close()
        self._waiting.popleft()

    def close(self, error: Exception) -> None:
        """Every job, and every later one, ends with `error`."""
        self._closed = error
        while self._waiting:
            slices, future = self._waiting.popleft()
            slices.close()
            if not future.cancelled():
                future.set_exception(error)
