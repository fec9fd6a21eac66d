"""The page's own routes: what is new, the acts of a person, and the page's scripts and styles."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.staticfiles import StaticFiles

from engine.errors import InvalidRequest, KVScopeError
from sessions.errors import NotStored, StoreError
from ui.api.bodies import Json
from ui.api.errors import describe, error_response
from ui.chat import ChatService
from ui.live import LivePage, LiveQuery

STATIC = Path(__file__).parent / "static"
NEW = "new"
"""Stands for the id of a chat that is not stored yet: it is stored with its first message."""
MAX_BODY_BYTES = 64 << 20
Act = Callable[[ChatService, str, Mapping[str, Any]], dict[str, Any]]
log = logging.getLogger("kvscope.page")


def static_path() -> str:
    """Where scripts and styles are served. Their content is in the path, so a browser never mixes two versions."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(STATIC.glob("*.*s")):
        digest.update(path.name.encode() + path.read_bytes())
    return f"/kvscope/{digest.hexdigest()}"


def add_page_routes(api: FastAPI, chat: ChatService) -> LivePage:
    """Declare the routes on `api`; they have to be there before anything is mounted at "/"."""
    page = LivePage(chat)

    @api.get("/api/sessions/{session_id}/live")
    def live(
        session_id: str,
        since: str = "",
        panel: bool = False,
        tensor: str = "k",
        layer: int = 0,
        head: int = 0,
        sessions: bool = False,
        search: str = "",
    ) -> Json:
        query = LiveQuery(since, panel, tensor, max(layer, 0), max(head, 0), sessions, search)
        return _answer(lambda: page.answer(None if session_id == NEW else session_id, query))

    @api.post("/api/sessions/{session_id}/acts")
    async def acts(session_id: str, request: Request) -> Json:
        raw = await request.body()
        return await asyncio.to_thread(_answer, lambda: perform(chat, session_id, _json_object(raw)))

    api.mount(static_path(), StaticFiles(directory=STATIC), name="kvscope-static")
    return page


def perform(chat: ChatService, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out `body["act"]`. Raises `KVScopeError` and `StoreError`, each one sentence."""
    name = _text(body, "act")
    if name not in ACTS:
        raise InvalidRequest(f"There is no act named {name[:40]!r}.")
    if session_id == NEW and name not in ("send", "import"):
        raise InvalidRequest("This chat has no messages yet.")
    return ACTS[name](chat, session_id, body)


def _send(chat: ChatService, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    content = _text(body, "content")
    if session_id != NEW:
        return {"session": session_id, "message": chat.send(session_id, content).user_message_id}
    session_id = chat.store.create().id
    try:
        chat.update_session(session_id, _settings(body))
        turn = chat.send(session_id, content)
    except BaseException:
        # Nobody asked for an empty chat: a first message that is refused leaves nothing behind.
        chat.store.delete(session_id)
        raise
    return {"session": session_id, "message": turn.user_message_id}


def _update(chat: ChatService, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    chat.update_session(session_id, _settings(body))
    return {}


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    changes = {name: body[name] for name in ("title", "system_prompt", "params") if name in body}
    for name in ("title", "system_prompt"):
        if not isinstance(changes.get(name, ""), str):
            raise InvalidRequest(f"{name} must be text.")
    if not isinstance(changes.get("params", {}), dict):
        raise InvalidRequest("params must be an object.")
    return changes


def _preview(chat: ChatService, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    found = chat.prices.preview(session_id, _text(body, "content"))
    return {
        "prompt_tokens": found.prompt_tokens,
        "reused_tokens": found.reused_tokens,
        "context_limit": found.context_limit,
        "dropped": list(found.dropped),
    }


def _import(chat: ChatService, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"session": chat.store.import_(body.get("data")).id}  # type: ignore[arg-type]


def _nothing(call: Callable[[ChatService, str, Mapping[str, Any]], object]) -> Act:
    def act(chat: ChatService, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        call(chat, session_id, body)
        return {}

    return act


ACTS: dict[str, Act] = {
    "send": _send,
    "edit": _nothing(lambda chat, sid, body: chat.edit(sid, _text(body, "message"), _text(body, "content"))),
    "edit_reply": _nothing(
        lambda chat, sid, body: chat.edit_reply(sid, _text(body, "message"), _text(body, "content"))
    ),
    "regenerate": _nothing(lambda chat, sid, body: chat.regenerate(sid, _optional(body, "message"))),
    "undo": lambda chat, sid, body: {"text": chat.undo(sid, _optional(body, "message"))},
    "delete": _nothing(lambda chat, sid, body: chat.delete_message(sid, _text(body, "message"))),
    "select": _nothing(lambda chat, sid, body: chat.select_branch(sid, _text(body, "message"))),
    "stop": lambda chat, sid, body: {"stopped": chat.stop(sid)},
    "text": lambda chat, sid, body: {"text": _stored_text(chat, sid, _text(body, "message"))},
    "fork": lambda chat, sid, body: {"session": chat.fork(sid, _optional(body, "message")).id},
    "update": _update,
    "delete_session": _nothing(lambda chat, sid, body: chat.delete_session(sid)),
    "preview": _preview,
    "import": _import,
}


def _stored_text(chat: ChatService, session_id: str, message_id: str) -> str:
    message = chat.store.message(message_id)
    if message.session_id != session_id:
        raise NotStored("This message does not exist in this session.")
    return message.content


def _answer(work: Callable[[], dict[str, Any]]) -> Json:
    try:
        return Json(work())
    except (KVScopeError, StoreError) as error:
        return error_response(*describe(error))
    except Exception as error:
        log.exception("a page's request failed")
        return error_response(*describe(error))


def _json_object(raw: bytes) -> Mapping[str, Any]:
    if len(raw) > MAX_BODY_BYTES:
        raise InvalidRequest("The request is too large.")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequest("The request is not JSON.") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The request must be a JSON object.")
    return body


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be text.")
    return value


def _optional(body: Mapping[str, Any], name: str) -> str | None:
    return None if body.get(name) is None else _text(body, name)
