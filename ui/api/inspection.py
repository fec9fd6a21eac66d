"""Routes that look: health, chat template (which may be changed), tokens of a text, cache, its snapshot (which may be
written), memory, counters."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.debugging.protocol import MapQuery, ProbeQuery, ValueQuery
from engine.errors import EngineStopped, InvalidRequest, NotFound
from sessions.errors import NotStored
from ui.api.bodies import Json, checked_uuid, read_object, required_text
from ui.api.messages import check_token_range, parse_messages, parse_token_ids
from ui.api.openai import render_stateless
from ui.api.prometheus import CONTENT_TYPE, metrics_text
from ui.chat import ChatService

MAP = MapQuery()


def add_inspection_routes(api: FastAPI, chat: ChatService) -> None:
    @api.get("/health")
    async def health() -> Response:
        status = chat.engine.status()
        known = chat.engine.capabilities() if status == "ok" else {}
        return Json({"status": status, "model": known.get("model"), "device": known.get("device")})

    @api.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(_metrics, chat), media_type=CONTENT_TYPE)

    @api.get("/api/memory")
    async def memory() -> Response:
        return Json(await asyncio.to_thread(chat.engine.memory))

    @api.get("/api/memory/history")
    async def memory_history() -> Response:
        return Json(await asyncio.to_thread(chat.engine.memory_history))

    @api.get("/api/template")
    async def template() -> Response:
        return Json(_template(chat))

    @api.put("/api/template")
    async def use_template(request: Request) -> Response:
        name = required_text(await read_object(request), "name")
        await asyncio.to_thread(chat.engine.use_template, name)
        return Json(_template(chat))

    @api.post("/api/sessions/{session_id}/snapshot")
    async def write_snapshot(session_id: str) -> Response:
        session_id = await known_session(chat, session_id)
        return Json(await asyncio.to_thread(chat.engine.snapshot, session_id))

    @api.get("/api/sessions/{session_id}/snapshot")
    async def snapshot(session_id: str) -> Response:
        session_id = await known_session(chat, session_id)
        return Json(await asyncio.to_thread(chat.engine.snapshot_info, session_id))


def add_cache_routes(api: FastAPI, chat: ChatService) -> None:
    @api.get("/api/sessions/{session_id}/cache")
    async def cache(session_id: str) -> Response:
        session_id = await known_session(chat, session_id)
        return Json(await asyncio.to_thread(chat.engine.inspect, session_id))

    @api.get("/api/sessions/{session_id}/cache/probe")
    async def probe(
        session_id: str,
        tensor: str = "k",
        layer: int = 0,
        head: int = 0,
        start: int = 0,
        count: int = 10,
        dims: int | None = None,
    ) -> Response:
        session_id = await known_session(chat, session_id)
        query = ProbeQuery(tensor, layer, head, start, count, dims)
        positions = await asyncio.to_thread(chat.engine.probe, session_id, query)
        return Json({"session_id": session_id, "tensor": tensor, "layer": layer, "head": head, "positions": positions})

    @api.get("/api/sessions/{session_id}/cache/map")
    async def cache_map(
        session_id: str, what: str = "k_norm", head: int | None = None, columns: int = MAP.columns
    ) -> Response:
        session_id = await known_session(chat, session_id)
        found = await asyncio.to_thread(chat.engine.cache_map, session_id, MapQuery(what, head, columns))
        return Json({"session_id": session_id, **found})

    @api.get("/api/sessions/{session_id}/cache/values")
    async def cached_values(
        session_id: str, tensor: str = "k", layer: int = 0, head: int = 0, position: int = 0
    ) -> Response:
        session_id = await known_session(chat, session_id)
        query = ValueQuery(tensor, layer, head, position)
        return Json({"session_id": session_id, **await asyncio.to_thread(chat.engine.cached_values, session_id, query)})

    @api.get("/api/sessions/{session_id}/cache/block")
    async def block(session_id: str, start: int = 0) -> Response:
        session_id = await known_session(chat, session_id)
        return Json({"session_id": session_id, **await asyncio.to_thread(chat.engine.block, session_id, start)})


def add_token_routes(api: FastAPI, chat: ChatService) -> None:
    @api.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_object(request)
        if ("messages" in body) == ("prompt" in body):
            raise InvalidRequest("Give either messages or prompt.")
        token_ids = await asyncio.to_thread(_tokenize, chat, body)
        return Json({"tokens": token_ids, "count": len(token_ids)})

    @api.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_object(request)
        token_ids = parse_token_ids("tokens", body.get("tokens"))
        text = await asyncio.to_thread(_detokenize, chat, token_ids)
        return Json({"text": text, "count": len(token_ids)})


def _tokenize(chat: ChatService, body: dict[str, Any]) -> list[int]:
    """A prompt's ids as `/v1/completions` would use them, a conversation's as `/v1/chat/completions` would."""
    if "messages" in body:
        return list(render_stateless(chat, parse_messages(body["messages"])))
    return list(chat.engine.tokenizer.encode(required_text(body, "prompt"), add_special_tokens=True))


def _detokenize(chat: ChatService, token_ids: tuple[int, ...]) -> str:
    check_token_range(token_ids, int(chat.engine.capabilities()["vocab_size"]))
    return chat.engine.tokenizer.decode(token_ids)


def _metrics(chat: ChatService) -> str:
    """While there is no engine, a scrape still succeeds and says so."""
    try:
        return metrics_text(chat.engine.metrics())
    except EngineStopped:
        return metrics_text(None)


def _template(chat: ChatService) -> dict[str, Any]:
    known = chat.engine.capabilities()
    return {"name": known["chat_template"], "names": known["chat_templates"]}


async def known_session(chat: ChatService, session_id: str) -> str:
    """The id as it is stored. Raises `InvalidRequest` and `NotFound`."""
    session_id = checked_uuid(session_id)
    try:
        await asyncio.to_thread(chat.store.get, session_id)
    except NotStored:
        raise NotFound("There is no session with this id.") from None
    return session_id
