"""Every error of every route in one shape: `{"error": {"message", "type", "code"}}`, one sentence, no traceback."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from engine.errors import KVScopeError
from sessions.errors import InvalidData, NotStored, StoreError
from ui.api.bodies import Json

INTERNAL = "Something went wrong inside KVScope; its log has the details."
CLIENT_GONE = 499
_SENTENCES = {
    404: ("not_found", "There is no such route."),
    405: ("method_not_allowed", "This route does not answer this method."),
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(status: int, code: str, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "code": code}}


def error_response(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Json:
    return Json(error_body(status, code, message), status, headers)


def describe(error: BaseException) -> tuple[int, str, str]:
    """`(status, code, sentence)` of an error; what nobody expected stays on the server."""
    if isinstance(error, KVScopeError):
        return error.status, error.code, str(error)
    if isinstance(error, NotStored):
        return 404, "not_found", str(error)
    if isinstance(error, InvalidData):
        return 400, "invalid_request", str(error)
    if isinstance(error, StoreError):
        return 507, "storage_failed", str(error)
    return 500, "internal_error", INTERNAL


def _parameter_sentence(error: RequestValidationError) -> str:
    """What is wrong with the first parameter of an address that is not of its type."""
    first = error.errors()[0]
    if not {"type", "loc", "input"} <= first.keys() or first["type"] == "missing":
        return f"{first['loc'][-1]} is missing."
    kind = {"int": "a whole number", "bool": "true or false"}.get(first["type"].split("_")[0], "another value")
    if first["type"] == "int_parsing_size":
        kind = "a smaller number"
    return f"{first['loc'][-1]} must be {kind}, not {first['input']!r:.40}."


def install_error_handlers(api: FastAPI) -> None:
    """Unexpected exceptions are answered here too; the server then logs them."""

    async def known(_: Request, error: Exception) -> Response:
        return error_response(*describe(error))

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code, sentence = _SENTENCES.get(error.status_code, ("http_error", "The request can't be answered."))
        return error_response(error.status_code, code, sentence, dict(error.headers or {}))

    async def parameter(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(400, "invalid_request", _parameter_sentence(error))

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    for kind in (KVScopeError, StoreError, Exception):
        api.add_exception_handler(kind, known)
    api.add_exception_handler(HTTPException, http)
    api.add_exception_handler(RequestValidationError, parameter)
    api.add_exception_handler(ClientDisconnect, gone)
