"""The OpenAI-compatible routes.

Where that interface leaves a choice: parts of a content are joined by line feeds; a conversation that ends with an
assistant message is continued, and the answer holds only what was added (with `session_id` it is refused); of
`max_tokens` and `max_completion_tokens` the smaller one counts; `/v1/completions` stops after 16 tokens unless told
otherwise; a prompt that does not fit is refused, nothing of it is dropped (with `session_id` whole oldest turns are).
With `num_beams` (an extension, with `length_penalty` and `early_stopping`) one reply is searched and comes as a whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.errors import InvalidRequest, NotFound
from engine.protocol import ChatMessage, TokenDelta
from engine.sampling.beam import BeamParams, check_settings
from engine.sampling.params import MAX_TOP_LOGPROBS, SamplingParams, check_whole
from ui.api.bodies import Json, checked_uuid, optional, read_object
from ui.api.generation import Indexed, Reply, seeded, stateless_events, turn_events, with_first_event
from ui.api.messages import check_token_range, parse_messages, parse_prompt
from ui.api.openai_shapes import ChatShape, CompletionShape, Shape, closing
from ui.api.params import LIMIT_ALIAS, NAMES, parse_params
from ui.api.sse import EventResponse, event, unless_client_leaves
from ui.chat import ChatService
from ui.thoughts import without_thoughts

MAX_CHOICES = 8
COMPLETION_TOKENS = 16
BEAM_SETTINGS = tuple(field.name for field in fields(BeamParams))
SETTINGS = (NAMES | {LIMIT_ALIAS}) - {"top_logprobs"}
ModelNames = Callable[[], list[str]]


class ModelUnknown(NotFound):
    code = "model_not_found"


@dataclass(frozen=True, slots=True)
class _Call:
    """What both routes read from a request alike."""

    params: SamplingParams
    choices: int
    stream: bool
    include_usage: bool
    beams: BeamParams


def add_openai_routes(api: FastAPI, chat: ChatService, models_on_disk: ModelNames) -> None:
    started = int(time.time())

    @api.get("/v1/models")
    async def models() -> Response:
        names = await asyncio.to_thread(_model_names, chat, models_on_disk)
        return Json({"object": "list", "data": [_model(name, loaded, started) for name, loaded in names]})

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        for known, loaded in await asyncio.to_thread(_model_names, chat, models_on_disk):
            if known == name:
                return Json(_model(known, loaded, started))
        raise ModelUnknown("There is no model with this name.")

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_object(request)
        shape = ChatShape(await asyncio.to_thread(_checked_model, chat, body, models_on_disk))
        messages = parse_messages(body.get("messages"))
        if body.get("session_id") is not None:
            return await _session_completion(request, chat, shape, messages, body)
        call = _read_call(body, SamplingParams(), _chat_logprobs(body))
        prompt_ids = await asyncio.to_thread(render_stateless, chat, messages, call.params.strip_thoughts)
        return await _answer(request, shape, call, _stateless(chat, prompt_ids, call))

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_object(request)
        model_name = await asyncio.to_thread(_checked_model, chat, body, models_on_disk)
        logprobs = _alternatives(body, "logprobs")
        call = _read_call(body, SamplingParams(max_tokens=COMPLETION_TOKENS), logprobs)
        echo = optional(body, "echo", bool, False)
        if echo and logprobs is not None:
            raise InvalidRequest("echo can't be combined with logprobs: the prompt's own are not computed.")
        prompt = parse_prompt(body.get("prompt"))
        prompt_ids, text = await asyncio.to_thread(_tokenize_prompt, chat, prompt)
        shape = CompletionShape(model_name, text if echo else "")
        return await _answer(request, shape, call, _stateless(chat, prompt_ids, call))


def _stateless(chat: ChatService, prompt_ids: tuple[int, ...], call: _Call) -> AsyncIterator[Indexed]:
    return stateless_events(chat.engine, prompt_ids, seeded(call.params, call.choices), call.beams)


async def _session_completion(
    request: Request, chat: ChatService, shape: Shape, messages: list[ChatMessage], body: dict[str, Any]
) -> Response:
    session_id = checked_uuid(body["session_id"])
    session = await asyncio.to_thread(chat.store.get, session_id)
    call = _read_call(body, parse_params(session.params), _chat_logprobs(body))
    if call.choices != 1:
        raise InvalidRequest("n must be 1 for a turn of a session.")
    turn = await asyncio.to_thread(chat.complete, session_id, messages, call.params, call.beams)
    return await _answer(request, shape, call, turn_events(turn))


async def _answer(request: Request, shape: Shape, call: _Call, events: AsyncIterator[Indexed]) -> Response:
    if not call.stream:
        return Json(await unless_client_leaves(request, _whole(shape, call, events)))
    ready = await unless_client_leaves(request, with_first_event(events))
    return EventResponse(_chunks(shape, call, ready))


async def _whole(shape: Shape, call: _Call, events: AsyncIterator[Indexed]) -> dict[str, Any]:
    replies = [Reply() for _ in range(call.choices)]
    async with aclosing(events):  # type: ignore[type-var]
        async for index, item in events:
            replies[index].add(item)
    return shape.answer(replies)


async def _chunks(shape: Shape, call: _Call, events: AsyncIterator[Indexed]) -> AsyncIterator[bytes]:
    replies = [Reply() for _ in range(call.choices)]
    no_usage = {"usage": None} if call.include_usage else {}
    opened: set[int] = set()
    async with aclosing(events):  # type: ignore[type-var]
        async for index, item in events:
            if index not in opened:
                opened.add(index)
                opening = shape.opening(index)
                if opening is not None:
                    yield event({**shape.chunk([opening]), **no_usage})
            replies[index].add(item)
            if isinstance(item, TokenDelta) and (item.text or item.logprobs):
                yield event({**shape.chunk([shape.delta(index, item.text, item.logprobs)]), **no_usage})
            elif replies[index].done:
                last = {"kvscope": closing(replies)["kvscope"]} if all(reply.done for reply in replies) else {}
                end = shape.end(index, replies[index].finish_reason)
                yield event({**shape.chunk([end]), **no_usage, **last})
    if call.include_usage:
        yield event({**shape.chunk([]), **closing(replies)})
    yield b"data: [DONE]\n\n"


def _read_call(body: dict[str, Any], base: SamplingParams, top_logprobs: int | None) -> _Call:
    settings = {name: body[name] for name in SETTINGS if name in body}
    params = parse_params({**settings, "top_logprobs": top_logprobs}, base)
    choices = 1 if body.get("n") is None else body["n"]
    check_whole("n", choices, 1, MAX_CHOICES)
    options = optional(body, "stream_options", dict, {})
    include_usage = optional(options, "include_usage", bool, False)
    beams = BeamParams(**{name: body[name] for name in BEAM_SETTINGS if body.get(name) is not None})
    check_settings(beams, params)
    if beams.searches and choices != 1:
        raise InvalidRequest("n must be 1 with num_beams: a search finds one reply.")
    return _Call(params, choices, optional(body, "stream", bool, False), include_usage, beams)


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    """How many alternatives to each token are wanted; None: no log probabilities at all."""
    wanted = optional(body, "logprobs", bool, False)
    top = _alternatives(body, "top_logprobs")
    if top is not None and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true.")
    return (top or 0) if wanted else None


def _alternatives(body: dict[str, Any], name: str) -> int | None:
    count = body.get(name)
    if count is not None:
        check_whole(name, count, 0, MAX_TOP_LOGPROBS)
    return count


def _model_names(chat: ChatService, models_on_disk: ModelNames) -> list[tuple[str, bool]]:
    """`(name, whether it is loaded)`, the loaded model first."""
    loaded = [str(chat.engine.capabilities()["model"])] if chat.engine.status() == "ok" else []
    return [(name, True) for name in loaded] + [(name, False) for name in models_on_disk() if name not in loaded]


DEFAULT_MODEL = "default"
"""Clients that must name a model may name this one."""


def _model(name: str, loaded: bool, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "kvscope", "loaded": loaded}


def _checked_model(chat: ChatService, body: dict[str, Any], models_on_disk: ModelNames) -> str:
    """The loaded model's name; a request may leave it out or say "default", but not name another one."""
    loaded = str(chat.engine.capabilities()["model"])
    wanted = optional(body, "model", str) or loaded
    if wanted in (loaded, DEFAULT_MODEL):
        return loaded
    if wanted in models_on_disk():
        raise ModelUnknown(f"The model {wanted!r} is on this disk but not loaded; {loaded} is.")
    raise ModelUnknown(f"There is no model {wanted[:100]!r}; {loaded} is loaded.")


def render_stateless(chat: ChatService, messages: list[ChatMessage], strip_thoughts: bool = False) -> tuple[int, ...]:
    """Ids of a conversation that belongs to no session. A template may show the day, but no time: the cache's sake."""
    today = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
    continued = messages[-1].role == "assistant"
    if strip_thoughts:
        earlier = messages[:-1] if continued else messages
        messages = [*(without_thoughts(item, chat.engine.tokenizer) for item in earlier), *messages[len(earlier) :]]
    return chat.engine.tokenizer.render(messages, today, not continued, continue_last=continued).token_ids


def _tokenize_prompt(chat: ChatService, prompt: str | tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """`(ids, text)` of a bare prompt; names of control tokens in the text mean those tokens."""
    tokenizer = chat.engine.tokenizer
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, add_special_tokens=True)), prompt
    check_token_range(prompt, int(chat.engine.capabilities()["vocab_size"]))
    return prompt, tokenizer.decode(prompt)
