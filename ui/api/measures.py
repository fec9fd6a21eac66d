"""Routes that measure: what the cache's format costs a session in precision, how long turns really are."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.debugging.protocol import PrecisionQuery
from engine.memory.plan import session_bytes
from ui.advice import advise
from ui.api.bodies import Json, checked_uuid, optional, read_object
from ui.chat import ChatService

COMPARED = PrecisionQuery(()).count


def add_measure_routes(api: FastAPI, chat: ChatService) -> None:
    @api.get("/api/advice")
    async def advice() -> Response:
        return Json(await asyncio.to_thread(_advice, chat))

    @api.post("/api/sessions/{session_id}/compare")
    async def compare(session_id: str, request: Request) -> Response:
        session_id = checked_uuid(session_id)
        body = await read_object(request, may_be_empty=True)
        count = optional(body, "count", int, COMPARED)
        kv_format = optional(body, "kv_format", str)
        return Json(await asyncio.to_thread(chat.compare_precision, session_id, count, kv_format))


def _advice(chat: ChatService) -> dict[str, Any]:
    known = chat.engine.capabilities()
    lengths = chat.store.turn_lengths()
    return advise(lengths, known["max_seq_len"], known["block_size"], lambda tokens: session_bytes(tokens, known))
