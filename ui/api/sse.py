"""Answers that come bit by bit: server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ui.api.bodies import dumps
from ui.api.errors import describe, error_body

T = TypeVar("T")
log = logging.getLogger("kvscope.http")


def event(data: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumps(data) + b"\n\n"


def error_data(error: BaseException) -> dict[str, Any]:
    """The error object for an answer that has already begun."""
    status, code, message = describe(error)
    if status == 500 and code == "internal_error":
        log.error("an answer broke off", exc_info=error)
    return error_body(status, code, message)


class EventResponse(Response):
    """Sends what `events` yields. When the client goes, the generator is closed at once, not at the next collection.

    An exception becomes a last event, named `error_name` if that is given.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], error_name: str | None = None) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._error_name = error_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await sending

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except OSError:
                raise
            except Exception as error:
                last = event(error_data(error), self._error_name)
                await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled (`ClientDisconnect`) if the client hangs up first."""
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_client_gone(request.receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
