"""All HTTP routes of the app, to which the page is then added."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from ui.api.audits import add_audit_routes
from ui.api.debugging import add_debugging_routes
from ui.api.errors import error_response, install_error_handlers
from ui.api.frozen import add_frozen_routes
from ui.api.inspection import add_cache_routes, add_inspection_routes, add_token_routes
from ui.api.measures import add_measure_routes
from ui.api.openai import add_openai_routes
from ui.api.sessions import add_session_routes
from ui.api.trace import add_trace_route
from ui.chat import ChatService

API_PATHS = ("/v1", "/api", "/health", "/metrics", "/tokenize", "/detokenize")


def build_api(chat: ChatService, models_on_disk: Callable[[], list[str]] = list) -> FastAPI:
    """The app's routes; `models_on_disk` gives the names of models that could be loaded."""
    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(api)
    add_openai_routes(api, chat, models_on_disk)
    add_token_routes(api, chat)
    add_session_routes(api, chat)
    add_inspection_routes(api, chat)
    add_cache_routes(api, chat)
    add_measure_routes(api, chat)
    add_audit_routes(api, chat)
    add_frozen_routes(api, chat)
    add_debugging_routes(api, chat)
    add_trace_route(api, chat)
    api.add_middleware(_ApiFence, routes=api.router.routes)
    return api


def is_api_path(path: str) -> bool:
    """Whether a program rather than a browser's page asks for this path."""
    return any(path == prefix or path.startswith(prefix + "/") for prefix in API_PATHS)


class _ApiFence:
    """Answers unknown routes below `API_PATHS`: the page, which is mounted at "/", would take them for its own."""

    def __init__(self, app: ASGIApp, routes: list[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_api_path(scope["path"]):
            return await self._app(scope, receive, send)
        matches = [route.matches(scope)[0] for route in self._routes if getattr(route, "path", "") != ""]
        if Match.FULL in matches:
            return await self._app(scope, receive, send)
        if Match.PARTIAL in matches:
            answer = error_response(405, "method_not_allowed", "This route does not answer this method.")
        else:
            answer = error_response(404, "not_found", "There is no such route.")
        return await answer(scope, receive, send)
