"""Keeps other web pages and other people out: a pure ASGI layer around everything that is served.

A page of another site, opened in the same browser, can send requests here. It can neither name this machine by a name
of its own (DNS rebinding), nor send with its own origin, nor load anything from here into itself.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ui.api.errors import error_response
from ui.api.routes import is_api_path
from ui.login import COOKIE, LOGIN_PATH, LoginPage

CONTENT_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; base-uri 'self'; object-src 'none'; "
    "form-action 'self'; frame-ancestors 'self'"
)
RESPONSE_HEADERS = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
OPEN_PATHS = ("/health",)
_SAFE_SITES = ("", "same-origin", "none")
_POLICY_VIOLATION = 1008


class Security:
    """`names` are host names of this machine beside the loopback ones; without `api_key` none is asked for."""

    def __init__(self, app: ASGIApp, *, names: Iterable[str] = (), api_key: str | None = None) -> None:
        self._app = app
        self._names = frozenset({"localhost", *(name.lower() for name in names if name)})
        self._api_key = api_key
        # The cookie proves that the key was known, without holding it; it stays good over a restart.
        self._cookie = hmac.digest((api_key or "").encode(), b"kvscope page login", hashlib.sha256).hex()
        self._login = LoginPage(api_key, self._cookie) if api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        send = _with_headers(send) if scope["type"] == "http" else send
        headers = Headers(scope=scope)
        refusal = self._foreign(scope, headers)
        if refusal is not None:
            return await _refuse(scope, receive, send, 403, "forbidden", refusal)
        if self._login is None or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        if scope["type"] == "http" and scope["path"] == LOGIN_PATH:
            return await self._login(scope, receive, send)
        if self._has_key(headers):
            return await self._app(scope, receive, send)
        if scope["type"] == "http" and not is_api_path(scope["path"]) and "text/html" in headers.get("accept", ""):
            return await self._login(scope, receive, send)
        sentence = "This needs the API key, as `Authorization: Bearer KEY`."
        return await _refuse(scope, receive, send, 401, "invalid_api_key", sentence)

    def _foreign(self, scope: Scope, headers: Headers) -> str | None:
        """Why a request is refused, whoever sends it; None if it may pass."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._known_host(hosts[0]):
            return "The request names a host that this is not."
        origins = headers.getlist("origin")
        if any(_authority(origin) != hosts[0].lower() for origin in origins):
            return "Pages of another origin may not use this."
        site = headers.get("sec-fetch-site", "")
        visit = headers.get("sec-fetch-mode") == "navigate" and scope.get("method") in ("GET", "HEAD")
        if site not in _SAFE_SITES and not (visit and headers.get("sec-fetch-dest") == "document"):
            return "Pages of another site may not use this."
        return None

    def _known_host(self, host: str) -> bool:
        """Loopback and own names; a bare address is never the result of a name that someone else controls."""
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if not name or not port.isdecimal():
            name = host
        if name.startswith("[") and name.endswith("]"):
            name = name[1:-1]
        try:
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return name.lower().removesuffix(".") in self._names

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(given.strip(), self._api_key or ""):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and _equal(cookie.value, self._cookie)


def _authority(origin: str) -> str:
    """`host[:port]` of an origin, "" for the origin of a page that has none."""
    scheme, separator, authority = origin.lower().partition("://")
    return authority if separator and scheme in ("http", "https") else ""


def _equal(given: str, wanted: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _with_headers(send: Send) -> Send:
    """Adds the policy to every answer, and takes out what would let other origins read it."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in RESPONSE_HEADERS}
            kept = [
                (name, value)
                for name, value in message.get("headers", ())
                if name.lower() not in own and not name.lower().startswith(b"access-control-")
            ]
            message = {**message, "headers": [*kept, *RESPONSE_HEADERS]}
        await send(message)

    return send_with_headers


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, code: str, sentence: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        return await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": sentence})
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return await error_response(status, code, sentence, headers)(scope, receive, send)
