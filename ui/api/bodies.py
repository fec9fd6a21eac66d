"""JSON in and out. What comes in is bounded in size and numbers; what goes out is always valid JSON."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import uuid
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.errors import InvalidRequest

MAX_BODY_BYTES = 8 << 20
MAX_IMPORT_BYTES = 64 << 20
MAX_DIGITS = 40
"""Of a whole number: more than any setting takes, so that the setting's own check can name its bounds."""


class TooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class Json(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(content, status_code, headers)

    def render(self, content: Any) -> bytes:
        return dumps(content)


def dumps(value: Any) -> bytes:
    """Compact JSON; numbers that are not finite become null, half characters become "?"."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


async def read_object(request: Request, *, limit: int = MAX_BODY_BYTES, may_be_empty: bool = False) -> dict[str, Any]:
    """The request's body as a JSON object. Raises `InvalidRequest`; more than `limit` bytes are not even read."""
    raw = await _read(request, limit)
    if may_be_empty and not raw.strip():
        return {}
    value = await asyncio.to_thread(_parse, raw)
    if not isinstance(value, dict):
        raise InvalidRequest("The request must be a JSON object.")
    return value


def checked_uuid(value: object, what: str = "session") -> str:
    """A UUID in the form that is stored. Raises `InvalidRequest`."""
    try:
        parsed = uuid.UUID(value) if isinstance(value, str) and len(value) == 36 else None
    except ValueError:
        parsed = None
    if parsed is None:
        raise InvalidRequest(f"A {what} id must be a UUID.")
    return str(parsed)


def optional(values: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """`values[name]` if it is of this type, the default if it is null or not there. Raises `InvalidRequest`."""
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {str: "text", bool: "true or false", int: "a whole number", dict: "an object"}
        raise InvalidRequest(f"{name} must be {names[kind]}.")
    return value


def required_text(values: dict[str, Any], name: str) -> str:
    value = optional(values, name, str)
    if value is None:
        raise InvalidRequest(f"{name} is missing.")
    return str(value)


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise TooLarge(f"The request is too large; the most is {limit >> 20} MiB.")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLarge(f"The request is too large; the most is {limit >> 20} MiB.")
        parts.append(part)
    return b"".join(parts)


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw, parse_constant=_no_number, parse_float=_float, parse_int=_int)
    except (ValueError, RecursionError):
        raise InvalidRequest("The request is not JSON.") from None


def _no_number(name: str) -> float:
    raise InvalidRequest(f"{name} is not a JSON number.")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest(f"A number in the request is too large; the most is {sys.float_info.max:.1e}.")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise InvalidRequest(f"A number in the request is too large; it may have {MAX_DIGITS} digits.")
    return int(text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
