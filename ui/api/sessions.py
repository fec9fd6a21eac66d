"""Routes of stored sessions: their list, their settings, the acts on their messages.

A turn begun here belongs to the session, not to the request: a client that hangs up loses nothing, `/stop` ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.errors import InvalidRequest, NotFound
from engine.protocol import TokenDelta
from engine.sampling.params import SamplingParams
from sessions.errors import NotStored
from sessions.models import Message, Session
from ui.api.bodies import MAX_IMPORT_BYTES, Json, checked_uuid, optional, read_object, required_text
from ui.api.generation import Reply, finished_turn
from ui.api.openai_shapes import kvscope
from ui.api.params import parse_params
from ui.api.sse import EventResponse, error_data, event
from ui.chat import ChatService
from ui.checks import MAX_MESSAGE_CHARS
from ui.turn import Turn

LISTED = 200
MAX_LISTED = 1000
STATS_EVERY_TOKENS = 8
SETTINGS = ("title", "system_prompt", "params")


def add_session_routes(api: FastAPI, chat: ChatService) -> None:
    _add_collection_routes(api, chat)
    _add_single_routes(api, chat)
    _add_turn_routes(api, chat)


def _add_collection_routes(api: FastAPI, chat: ChatService) -> None:
    @api.get("/api/sessions")
    async def list_sessions(q: str = "", limit: int = LISTED) -> Response:
        found = await asyncio.to_thread(chat.store.list, q, max(1, min(limit, MAX_LISTED)))
        return Json({"sessions": [asdict(summary) for summary in found]})

    @api.post("/api/sessions")
    async def create(request: Request) -> Response:
        settings = _settings(await read_object(request, may_be_empty=True))
        settings = {name: value for name, value in settings.items() if value is not None}
        session = await asyncio.to_thread(lambda: chat.store.create(**settings))
        return Json(await asyncio.to_thread(_whole_session, chat, session.id))

    @api.post("/api/sessions/import")
    async def import_session(request: Request) -> Response:
        data = await read_object(request, limit=MAX_IMPORT_BYTES)
        stored = data.get("session")
        if isinstance(stored, dict) and isinstance(stored.get("params"), dict):
            parse_params(stored["params"])
        session = await asyncio.to_thread(chat.store.import_, data)
        return Json(await asyncio.to_thread(_whole_session, chat, session.id))


def _add_single_routes(api: FastAPI, chat: ChatService) -> None:
    @api.get("/api/sessions/{session_id}")
    async def read(session_id: str) -> Response:
        return Json(await asyncio.to_thread(_whole_session, chat, checked_uuid(session_id)))

    @api.patch("/api/sessions/{session_id}")
    async def update(session_id: str, request: Request) -> Response:
        session_id = checked_uuid(session_id)
        changes = _settings(await read_object(request))
        if None in changes.values():
            raise InvalidRequest("A setting of a session can't be null.")
        await asyncio.to_thread(chat.update_session, session_id, changes)
        return Json(await asyncio.to_thread(_whole_session, chat, session_id))

    @api.delete("/api/sessions/{session_id}")
    async def delete(session_id: str) -> Response:
        session_id = checked_uuid(session_id)
        await asyncio.to_thread(chat.delete_session, session_id)
        return Json({"id": session_id, "deleted": True})

    @api.get("/api/sessions/{session_id}/export")
    async def export(session_id: str, format: str = "json") -> Response:
        session_id = checked_uuid(session_id)
        name = f"kvscope-{session_id[:8]}"
        if format == "json":
            data = await asyncio.to_thread(_stored, lambda: chat.store.export(session_id))
            return Json(data, headers={"content-disposition": f'attachment; filename="{name}.json"'})
        if format in ("md", "markdown"):
            text = await asyncio.to_thread(_stored, lambda: chat.store.export_markdown(session_id))
            headers = {"content-disposition": f'attachment; filename="{name}.md"'}
            return Response(text.encode("utf-8", "replace"), 200, headers, "text/markdown; charset=utf-8")
        raise InvalidRequest('format must be "json" or "md".')

    @api.post("/api/sessions/{session_id}/undo")
    async def undo(session_id: str, request: Request) -> Response:
        session_id, message_id, _ = await _act(request, session_id)
        text = await asyncio.to_thread(chat.undo, session_id, message_id)
        session = await asyncio.to_thread(chat.store.get, session_id)
        return Json({"text": text, "head_id": session.head_id})

    @api.post("/api/sessions/{session_id}/stop")
    async def stop(session_id: str, request: Request) -> Response:
        session_id, _, _ = await _act(request, session_id)
        await asyncio.to_thread(_session, chat, session_id)
        return Json({"stopped": await asyncio.to_thread(chat.stop, session_id)})

    @api.post("/api/sessions/{session_id}/fork")
    async def fork(session_id: str, request: Request) -> Response:
        session_id, message_id, _ = await _act(request, session_id)
        twin = await asyncio.to_thread(chat.fork, session_id, message_id)
        return Json(await asyncio.to_thread(_whole_session, chat, twin.id))


def _add_turn_routes(api: FastAPI, chat: ChatService) -> None:
    @api.post("/api/sessions/{session_id}/messages")
    async def send(session_id: str, request: Request) -> Response:
        session_id = checked_uuid(session_id)
        body = await read_object(request)
        content = required_text(body, "content")
        return await _turn(chat, session_id, body, lambda params: chat.send(session_id, content, params))

    @api.put("/api/sessions/{session_id}/messages/{message_id}")
    async def edit(session_id: str, message_id: str, request: Request) -> Response:
        session_id, message_id = checked_uuid(session_id), checked_uuid(message_id, "message")
        body = await read_object(request)
        content = required_text(body, "content")
        return await _turn(chat, session_id, body, lambda params: chat.edit(session_id, message_id, content, params))

    @api.post("/api/sessions/{session_id}/regenerate")
    async def regenerate(session_id: str, request: Request) -> Response:
        session_id, message_id, body = await _act(request, session_id)
        return await _turn(chat, session_id, body, lambda params: chat.regenerate(session_id, message_id, params))


async def _turn(
    chat: ChatService, session_id: str, body: dict[str, Any], begin: Callable[[SamplingParams | None], Turn]
) -> Response:
    """Begin a turn and answer with its events, or with its end. Settings that are not given are the session's own."""
    stream = optional(body, "stream", bool, False)
    changes = optional(body, "params", dict)
    session = await asyncio.to_thread(_session, chat, session_id)
    params = None if changes is None else parse_params(changes, parse_params(session.params))
    turn = await asyncio.to_thread(begin, params)
    if stream:
        return EventResponse(_turn_events(turn), "error")
    reply = await finished_turn(turn)
    message = await asyncio.to_thread(chat.store.message, turn.message_id)
    return Json({**_turn_ids(turn), "message": _message(message), **_turn_end(reply)})


async def _turn_events(turn: Turn) -> AsyncIterator[bytes]:
    """`start` with the ids, `token` and `stats` as they come, and `done` or `error` once the reply is stored."""
    yield event(_turn_ids(turn), "start")
    reply = Reply()
    async for item in turn.events():
        reply.add(item)
        if isinstance(item, TokenDelta):
            yield event({"text": item.text, "token_ids": item.token_ids, **_logprobs(item)}, "token")
        count = item.stats.generated_tokens if item.stats is not None else 0
        if not reply.done and (not isinstance(item, TokenDelta) or count % STATS_EVERY_TOKENS == 1):
            yield event(kvscope(item.stats), "stats")
    error = turn.view().error
    if error is not None:
        yield event(error_data(error), "error")
        return
    yield event(kvscope(reply.stats), "stats")
    yield event({**_turn_ids(turn), **_turn_end(reply)}, "done")


def _turn_ids(turn: Turn) -> dict[str, Any]:
    return {
        "session_id": turn.session_id,
        "user_message_id": turn.user_message_id,
        "message_id": turn.message_id,
        "dropped": list(turn.dropped),
        "max_new_tokens": turn.max_new_tokens,
    }


def _turn_end(reply: Reply) -> dict[str, Any]:
    reason = reply.stats.finish_reason if reply.stats is not None else None
    return {"content": "".join(reply.text), "finish_reason": reason, "kvscope": kvscope(reply.stats)}


def _logprobs(item: TokenDelta) -> dict[str, Any]:
    return {"logprobs": [asdict(logprob) for logprob in item.logprobs]} if item.logprobs else {}


async def _act(request: Request, session_id: str) -> tuple[str, str | None, dict[str, Any]]:
    """`(session id, message id, body)` of an act whose body may be empty."""
    session_id = checked_uuid(session_id)
    body = await read_object(request, may_be_empty=True)
    message_id = body.get("message_id")
    return session_id, None if message_id is None else checked_uuid(message_id, "message"), body


def _settings(body: dict[str, Any]) -> dict[str, Any]:
    """Title, system prompt and sampling settings of a session, as far as they are given."""
    unknown = sorted(set(body) - set(SETTINGS))
    if unknown:
        raise InvalidRequest(f"A session has no setting named {unknown[0][:40]!r}.")
    optional(body, "title", str)
    parse_params(optional(body, "params", dict, {}))
    length = len(optional(body, "system_prompt", str, ""))
    if length >= MAX_MESSAGE_CHARS:
        raise InvalidRequest(f"The system prompt has {length} characters; the most is {MAX_MESSAGE_CHARS - 1}.")
    return {name: body[name] for name in SETTINGS if name in body}


def _session(chat: ChatService, session_id: str) -> Session:
    return _stored(lambda: chat.store.get(session_id))


def _stored(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except NotStored:
        raise NotFound("There is no session with this id.") from None


def _whole_session(chat: ChatService, session_id: str) -> dict[str, Any]:
    """Everything of a session but its other branches; those show as `siblings` of a message."""
    session = _session(chat, session_id)
    branch = chat.store.branch(session_id)
    numbers = {record.message_id: record.stats for record in chat.store.turns(session_id)}
    messages = [
        {**_message(item), "siblings": list(branch.siblings[item.id]), "kvscope": numbers.get(item.id)}
        for item in branch.messages
    ]
    return {**asdict(session), "running": chat.running(session_id) is not None, "messages": messages}


def _message(message: Message) -> dict[str, Any]:
    plain = asdict(message)
    count = None if message.token_ids is None else len(message.token_ids)
    del plain["session_id"], plain["token_ids"]
    return {**plain, "token_count": count}
