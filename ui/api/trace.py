"""Where the time of a session's last turns went, as a file for trace viewers."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.responses import Response

from ui.api.bodies import Json
from ui.api.inspection import known_session
from ui.chat import ChatService


def add_trace_route(api: FastAPI, chat: ChatService) -> None:
    @api.get("/api/sessions/{session_id}/trace")
    async def trace(session_id: str) -> Response:
        session_id = await known_session(chat, session_id)
        name = f"kvscope-{session_id[:8]}.trace.json"
        found = await asyncio.to_thread(chat.engine.trace, session_id)
        return Json(found, headers={"content-disposition": f'attachment; filename="{name}"'})
