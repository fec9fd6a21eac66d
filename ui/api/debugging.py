"""Routes of the debugging view: the tokens of a reply, how sure the model was of them, and whose fault a loop is."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.debugging.protocol import TokenQuery
from ui.api.bodies import Json, checked_uuid, optional, read_object
from ui.api.waiting import while_connected
from ui.certainty import certainty
from ui.chat import ChatService
from ui.debugging import Debugging

SHOWN = TokenQuery("", (), ()).count
COLUMNS = 256


def add_debugging_routes(api: FastAPI, chat: ChatService) -> None:
    debugging = Debugging(chat, getattr(chat.engine, "audit", None))

    @api.get("/api/sessions/{session_id}/tokens")
    async def tokens(
        session_id: str,
        message_id: str | None = None,
        start: int = 0,
        count: int = SHOWN,
        alternatives: bool = True,
    ) -> Response:
        session_id, message_id = _ids(session_id, message_id)
        return Json(await asyncio.to_thread(debugging.tokens, session_id, message_id, start, count, alternatives))

    @api.get("/api/sessions/{session_id}/certainty")
    async def certain(session_id: str, message_id: str, columns: int = COLUMNS) -> Response:
        session_id, message_id = checked_uuid(session_id), checked_uuid(message_id, "message")
        return Json(await asyncio.to_thread(certainty, chat, session_id, message_id, columns))

    @api.post("/api/sessions/{session_id}/diagnose")
    async def diagnose(session_id: str, request: Request) -> Response:
        body = await read_object(request, may_be_empty=True)
        session_id, message_id = _ids(session_id, body.get("message_id"))
        max_tokens = optional(body, "max_tokens", int)
        return Json(await while_connected(request, debugging.diagnose, session_id, message_id, max_tokens))

    @api.post("/api/sessions/{session_id}/diagnose/stop")
    async def stop(session_id: str) -> Response:
        return Json({"stopped": debugging.stop(checked_uuid(session_id))})


def _ids(session_id: str, message_id: Any) -> tuple[str, str | None]:
    return checked_uuid(session_id), None if message_id is None else checked_uuid(message_id, "message")
