"""Long work beside the turns: advanced by one slice after each step, so that no stream waits for all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from engine.errors import Stopped

T = TypeVar("T")
Slices = Generator[None, None, T]
"""Work that hands the thread back at each `yield`; its result is what it returns."""


def never() -> bool:
    """For work that is not stopped by hand."""
    return False


class Run(Generic[T]):
    """One pass over slices; `result` is there when it is over."""

    result: T

    def __init__(self, slices: Slices[T]) -> None:
        self._slices = slices

    def __iter__(self) -> Iterator[None]:
        self.result = yield from self._slices


def run_through(slices: Slices[T]) -> T:
    """All slices in one go."""
    run = Run(slices)
    for _ in run:
        pass
    return run.result


def cancellable(slices: Slices[T], cancelled: Callable[[], bool], what: str) -> Slices[T]:
    """The same work; `Stopped` is raised after the slice in which `cancelled` came true."""
    run = Run(slices)
    for _ in run:
        if cancelled():
            slices.close()
            raise Stopped(f"The {what} was stopped.")
        yield
    return run.result


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
