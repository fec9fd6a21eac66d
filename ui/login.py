"""The small page that asks a browser for the API key."""

from __future__ import annotations

import hmac
import html
import time
from collections import OrderedDict, deque
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

LOGIN_PATH = "/login"
COOKIE = "kvscope_key"
COOKIE_DAYS = 30
MAX_TRIES = 10
TRIES_WINDOW_S = 60.0
_MAX_FORM_BYTES = 8 << 10
_ADDRESSES_KEPT = 4096
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>KVScope</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; display: grid; place-items: center; min-height: 90vh; margin: 0 }}
form {{ width: min(22rem, 86vw) }} h1 {{ font-size: 1.35rem; margin: 0 0 .25rem }} p {{ margin: 0 0 1rem; opacity: .8 }}
input, button {{ font: inherit; width: 100%; box-sizing: border-box; padding: .6rem .7rem; border-radius: .5rem }}
input {{ border: 1px solid #8889; margin-bottom: .6rem }} button {{ border: 0; background: #15796e; color: #fff }}
.note {{ color: #c0392b; opacity: 1 }}
</style></head><body><form method="post" action="{action}">
<h1>KVScope</h1><p>This app asks for the API key it was started with.</p>{note}
<input type="hidden" name="next" value="{target}">
<input type="password" name="key" aria-label="API key" placeholder="API key" autocomplete="current-password" autofocus>
<button type="submit">Open</button></form></body></html>
"""


class TryLimiter:
    """At most `MAX_TRIES` failures per address and `TRIES_WINDOW_S`."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def allows(self, address: str) -> bool:
        recent = self._failures.get(address, deque())
        while recent and recent[0] < time.monotonic() - TRIES_WINDOW_S:
            recent.popleft()
        return len(recent) < MAX_TRIES

    def failed(self, address: str) -> None:
        self._failures.setdefault(address, deque()).append(time.monotonic())
        self._failures.move_to_end(address)
        while len(self._failures) > _ADDRESSES_KEPT:
            self._failures.popitem(last=False)


class LoginPage:
    """Shows the form for any page, takes it at `LOGIN_PATH`, and sets `cookie` for who knows the key."""

    def __init__(self, api_key: str, cookie: str) -> None:
        self._api_key = api_key.encode()
        self._cookie = cookie
        self._limiter = TryLimiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.url.path == LOGIN_PATH and request.method == "POST":
            response = await self._take(request)
        else:
            query = f"?{request.url.query}" if request.url.query else ""
            target = "/" if request.url.path == LOGIN_PATH else request.url.path + query
            response = _form(target, "", 401)
        await response(scope, receive, send)

    async def _take(self, request: Request) -> Response:
        form = parse_qs((await _read_form(request)).decode("utf-8", "replace"), keep_blank_values=True)
        target = _own_target(form.get("next", ["/"])[0])
        address = request.client.host if request.client else ""
        if not self._limiter.allows(address):
            return _form(target, "Too many tries; wait a minute.", 429)
        if not hmac.compare_digest(form.get("key", [""])[0].strip().encode(), self._api_key):
            self._limiter.failed(address)
            return _form(target, "This is not the key.", 401)
        response = RedirectResponse(target, 303)
        response.set_cookie(
            COOKIE,
            self._cookie,
            max_age=COOKIE_DAYS * 86400,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response


async def _read_form(request: Request) -> bytes:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _MAX_FORM_BYTES:
            return b""
    return data


def _own_target(target: str) -> str:
    """Where to go after the login: a path of this app, never another site."""
    harmless = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if harmless else "/"


def _form(target: str, note: str, status: int) -> Response:
    shown = f'<p class="note" role="alert">{html.escape(note)}</p>' if note else ""
    page = _PAGE.format(action=LOGIN_PATH, note=shown, target=html.escape(_own_target(target)))
    return HTMLResponse(page, status, {"cache-control": "no-store"})
