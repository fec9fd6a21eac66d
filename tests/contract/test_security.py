"""Who may ask: hosts, origins, sites, the key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi.responses import HTMLResponse
from fastapi.testclient import TestClient
from starlette.middleware.cors import CORSMiddleware

from tests.contract.test_openai import assert_error
from ui.api.routes import build_api
from ui.login import COOKIE, MAX_TRIES
from ui.network import is_loopback, own_names
from ui.security import Security

KEY = "a-long-secret"


@pytest.fixture(scope="module")
def api(standing_chat):
    """The routes with a page, which says to every origin that it may read it."""
    api = build_api(standing_chat)
    api.add_api_route("/", lambda: HTMLResponse("the page"))
    api.add_middleware(CORSMiddleware, allow_origins=["*"], allow_credentials=True)
    return api


def client_for(app, host: str = "127.0.0.1:7860") -> TestClient:
    return TestClient(app, base_url=f"http://{host}", raise_server_exceptions=False, follow_redirects=False)


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:7860", True), ("127.0.0.1", True), ("localhost:7860", True), ("LOCALHOST", True),
        ("[::1]:7860", True), ("[::1]", True), ("192.168.1.5:7860", True), ("mybox:7860", True), ("mybox.local", True),
        ("evil.example", False), ("evil.example:7860", False), ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False), ("evil-localhost", False), ("", False), ("[::1].evil.example", False),
        ("127.0.0.1@evil.example", False), ("2130706433", False),
    ],
)  # fmt: skip
def test_only_hosts_that_this_is(api, host, known):
    client = client_for(Security(api, names=("mybox", "mybox.local")))
    for path in ("/health", "/", "/v1/models"):
        response = client.get(path, headers={"host": host})
        assert response.status_code == (200 if known else 403), path
    if not known:
        assert_error(client.post("/api/sessions", headers={"host": host}), 403)


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://evil.example:7860", "null", "http://127.0.0.1", "http://127.0.0.1:3000",
     "http://localhost:7860", "http://127.0.0.1:7860.evil.example", "chrome-extension://abc", "file://", ""],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_no_foreign_origin(api, origin, method):
    headers = {"origin": origin, "access-control-request-method": "POST"}
    response = client_for(Security(api)).request(method, "/api/sessions", headers=headers)
    assert_error(response, 403)
    assert not any(name.startswith("access-control") for name in response.headers)


def test_the_own_origin_may_and_is_not_told_to_share(api):
    headers = {"origin": "http://127.0.0.1:7860", "sec-fetch-site": "same-origin"}
    response = client_for(Security(api)).post("/api/sessions", headers=headers)
    assert response.status_code == 200
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_may_link_here_and_no_more(api, site):
    client = client_for(Security(api))
    visit = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client.get("/", headers=visit).status_code == 200
    assert_error(client.post("/api/sessions", headers=visit), 403)
    assert_error(client.get("/", headers={**visit, "sec-fetch-dest": "iframe"}), 403)
    for mode in ("no-cors", "cors", "websocket"):
        assert_error(client.get("/api/sessions", headers={"sec-fetch-site": site, "sec-fetch-mode": mode}), 403)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/nope", "/api/sessions"])
def test_every_answer_carries_the_policy(api, path):
    headers = client_for(Security(api)).get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "form-action 'self'" in policy and "frame-ancestors" in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize(
    "given", [{}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"},
              {"authorization": "Bearer "}, {"cookie": f"{COOKIE}={KEY}"}, {"cookie": f"{COOKIE}="},
              {"cookie": "\xff=;;="}, {"authorization": f"Bearer {KEY}x"}],
)  # fmt: skip
def test_without_the_key_nothing_but_health_answers(api, given):
    client = client_for(Security(api, api_key=KEY))
    headers = {name.encode(): value.encode("latin-1") for name, value in given.items()}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/api/sessions"),
                         ("GET", "/metrics"), ("GET", "/anything"), ("POST", "/")):  # fmt: skip
        response = client.request(method, path, headers=headers)
        assert assert_error(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert client.get("/health", headers=headers).status_code == 200


def test_the_key_opens(api):
    client = client_for(Security(api, api_key=KEY))
    for scheme in ("Bearer", "bearer"):
        assert client.get("/v1/models", headers={"authorization": f"{scheme} {KEY}"}).status_code == 200


def test_a_browser_gets_a_form_and_then_a_cookie(api):
    client = client_for(Security(api, api_key=KEY))
    page = client.get("/?session=<x>", headers={"accept": "text/html"})
    assert page.status_code == 401 and "<form" in page.text and "the page" not in page.text
    assert "<x>" not in page.text
    wrong = client.post("/login", data={"key": "wrong", "next": "/"})
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
    right = client.post("/login", data={"key": KEY, "next": "/?session=abc"})
    assert right.status_code == 303 and right.headers["location"] == "/?session=abc"
    cookie = right.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower() and KEY not in cookie
    assert client.get("/", headers={"accept": "text/html"}).text == "the page"
    assert client.get("/v1/models").status_code == 200


def test_the_cookie_outlives_a_restart_but_not_another_key(api):
    first = client_for(Security(api, api_key=KEY))
    value = first.post("/login", data={"key": KEY}).cookies[COOKIE]
    for key, status in ((KEY, 200), ("another", 401)):
        other = client_for(Security(api, api_key=key))
        assert other.get("/v1/models", headers={"cookie": f"{COOKIE}={value}"}).status_code == status


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "x", "", "/\r\nX: y"])
def test_the_login_leads_nowhere_else(api, target):
    response = client_for(Security(api, api_key=KEY)).post("/login", data={"key": KEY, "next": target})
    assert response.headers["location"] == "/"


def test_guessing_is_slow(api):
    client = client_for(Security(api, api_key=KEY))
    for _ in range(MAX_TRIES):
        assert client.post("/login", data={"key": "wrong"}).status_code == 401
    assert client.post("/login", data={"key": KEY}).status_code == 429
    assert client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_a_huge_or_odd_login_form(api):
    client = client_for(Security(api, api_key=KEY))
    for content in (b"key=" + b"x" * 100_000, b"\xff\xfe", b"", b"key", b"{}"):
        assert client.post("/login", content=content).status_code == 401


def test_a_foreign_page_can_not_log_in(api):
    client = client_for(Security(api, api_key=KEY))
    headers = {"origin": "http://evil.example"}
    assert_error(client.post("/login", data={"key": KEY}, headers=headers), 403)


@pytest.mark.parametrize(
    ("headers", "api_key", "passes"),
    [
        ({}, None, True),
        ({"host": "evil.example"}, None, False),
        ({"origin": "http://evil.example"}, None, False),
        ({}, KEY, False),
        ({"authorization": f"Bearer {KEY}"}, KEY, True),
    ],
)
def test_web_sockets_are_guarded_too(headers, api_key, passes):
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    sent: list[dict[str, Any]] = []

    async def call() -> None:
        raw = [(k.encode(), v.encode()) for k, v in {"host": "127.0.0.1:7860", **headers}.items()]
        scope = {"type": "websocket", "path": "/ws", "headers": raw}

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await Security(app, api_key=api_key)(scope, receive, send)

    asyncio.run(call())
    assert reached == (["websocket"] if passes else [])
    assert passes or sent[0]["type"] == "websocket.close"


def test_loopback_and_names():
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.2", "::1", "localhost", "LocalHost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.2", "example.org", "localhost.evil", "")))
    assert "box.lan" in own_names("box.lan")
