"""Routes of frozen prefixes: texts whose keys and values are computed ahead of the chats that begin with them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.errors import InvalidRequest, NotFound
from sessions.errors import NotStored
from ui.api.bodies import Json, checked_uuid, read_object, required_text
from ui.chat import ChatService


def add_frozen_routes(api: FastAPI, chat: ChatService) -> None:
    @api.get("/api/frozen")
    async def frozen() -> Response:
        return Json({"frozen": await asyncio.to_thread(chat.engine.frozen)})

    @api.post("/api/frozen")
    async def freeze(request: Request) -> Response:
        body = await read_object(request)
        return Json(await asyncio.to_thread(lambda: chat.engine.freeze(_text(chat, body))))

    @api.delete("/api/frozen/{name}")
    async def unfreeze(name: str) -> Response:
        await asyncio.to_thread(chat.engine.unfreeze, name)
        return Json({"deleted": name})


def _text(chat: ChatService, body: dict[str, Any]) -> str:
    """The text that was sent, or a session's system prompt. Raises `InvalidRequest` and `NotFound`."""
    if ("text" in body) == ("session_id" in body):
        raise InvalidRequest("Give either text or session_id.")
    if "text" in body:
        return required_text(body, "text")
    try:
        return chat.store.get(checked_uuid(body["session_id"])).system_prompt
    except NotStored:
        raise NotFound("There is no session with this id.") from None
