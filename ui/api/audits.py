"""Routes that look for faults of the cache, repair them, tell what acts cost, and, where allowed, make faults."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from engine.protocol import FaultRequest
from ui.api.bodies import Json, checked_uuid, optional, read_object, required_text
from ui.api.inspection import known_session
from ui.chat import ChatService


def add_audit_routes(api: FastAPI, chat: ChatService) -> None:
    @api.post("/api/sessions/{session_id}/audit")
    async def audit(session_id: str, request: Request) -> Response:
        session_id = await known_session(chat, session_id)
        positions = _positions(await read_object(request, may_be_empty=True))
        return Json(await asyncio.to_thread(chat.engine.audit, session_id, positions))

    @api.post("/api/sessions/{session_id}/repair")
    async def repair(session_id: str) -> Response:
        session_id = await known_session(chat, session_id)
        return Json(await asyncio.to_thread(chat.engine.repair, session_id))

    @api.get("/api/sessions/{session_id}/misses")
    async def misses(session_id: str) -> Response:
        session_id = checked_uuid(session_id)
        return Json({"session_id": session_id, "misses": await asyncio.to_thread(chat.misses, session_id)})

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
        return Json(await asyncio.to_thread(chat.price, session_id, *given))

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
