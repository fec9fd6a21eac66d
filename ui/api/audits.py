"""Routes that look for faults of the cache, repair them, tell what acts cost, and, where allowed, make faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.debugging.protocol import FaultRequest
from engine.errors import InvalidRequest
from ui.api.bodies import Json, checked_uuid, optional, read_object, required_text
from ui.api.inspection import known_session
from ui.api.waiting import while_connected
from ui.chat import ChatService
from ui.stoppable import Stoppable


def add_audit_routes(api: FastAPI, chat: ChatService) -> None:
    running = Stoppable("This session is being audited already; wait for it or stop it first.")

    def audited(session_id: str, act: Callable[..., dict[str, Any]], gone: Callable[[], bool]) -> dict[str, Any]:
        with running.claim(session_id) as stopped:
            return act(session_id, cancelled=lambda: stopped.is_set() or gone())

    @api.post("/api/sessions/{session_id}/audit")
    async def audit(session_id: str, request: Request) -> Response:
        session_id = await known_session(chat, session_id)
        positions = _positions(await read_object(request, may_be_empty=True))
        act = partial(chat.engine.audit, positions=positions)
        return Json(await while_connected(request, audited, session_id, act))

    @api.post("/api/sessions/{session_id}/audit/stop")
    async def stop(session_id: str) -> Response:
        return Json({"stopped": running.stop(checked_uuid(session_id))})

    @api.post("/api/sessions/{session_id}/repair")
    async def repair(session_id: str, request: Request) -> Response:
        session_id = await known_session(chat, session_id)
        return Json(await while_connected(request, audited, session_id, chat.engine.repair))

    @api.get("/api/sessions/{session_id}/misses")
    async def misses(session_id: str) -> Response:
        session_id = checked_uuid(session_id)
        return Json({"session_id": session_id, "misses": await asyncio.to_thread(chat.prices.misses, session_id)})

    @api.post("/api/sessions/{session_id}/price")
    async def price(session_id: str, request: Request) -> Response:
        session_id = checked_uuid(session_id)
        body = await read_object(request)
        message_id = body.get("message_id")
        given = (
            required_text(body, "action"),
            None if message_id is None else checked_uuid(message_id, "message"),
            optional(body, "content", str),
        )
        return Json(await asyncio.to_thread(chat.prices.price, session_id, *given))

    @api.post("/api/debug/inject")
    async def inject(request: Request) -> Response:
        fault = _fault(await read_object(request))
        await known_session(chat, fault.session_id)
        return Json(await asyncio.to_thread(chat.engine.inject, fault))


def _positions(body: dict[str, Any]) -> int | list[int] | None:
    """How many positions, or which; None: all. Raises `InvalidRequest`."""
    value = body.get("positions")
    if value is None or type(value) is int:
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    raise InvalidRequest("positions must be a whole number or a list of positions.")


def _fault(body: dict[str, Any]) -> FaultRequest:
    amount = body.get("amount")
    if amount is not None and (isinstance(amount, bool) or not isinstance(amount, int | float)):
        raise InvalidRequest("amount must be a number.")
    layer = optional(body, "layer", int) if "layer" in body else 0
    return FaultRequest(
        session_id=checked_uuid(body.get("session_id")),
        kind=required_text(body, "kind"),
        layer=layer,
        start=optional(body, "start", int, 0),
        count=optional(body, "count", int, 1),
        amount=amount,
    )
