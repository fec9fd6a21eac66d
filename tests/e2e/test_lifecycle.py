"""Start, end and restart of the app under an open page; the key; and a page without any network."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.support.app_process import AppProcess, wait_for
from tests.support.chat_page import ChatPage, Visitor

pytestmark = pytest.mark.e2e
KEY = "a-key-of-this-test"
LOST = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET", "ERR_INCOMPLETE_CHUNKED_ENCODING")


@pytest.fixture
def start(folders: Callable[[], Path]) -> Iterator[Callable[..., AppProcess]]:
    """Begins to start apps, which end with the test."""
    started: list[AppProcess] = []

    def begin(data_dir: Path, port: int) -> AppProcess:
        started.append(AppProcess(data_dir, "--max-seq-len", "1024", port=port, key=KEY))
        return started[-1].start(until_ready=False)

    yield begin
    for process in started:
        process.stop(signal.SIGKILL)


def test_start_and_restart_under_an_open_page(start, visit, folders) -> None:
    """The page is there, behind its key, while the model loads. The end of the app stores what was being written; the
    page says so, comes back with the app and goes on."""
    port = free_port()
    first: AppProcess = start(folders(), port)
    first.url = f"http://127.0.0.1:{port}"
    visitor: Visitor = visit(first.url)
    visitor.expect_errors("the server responded with a status of 401", *LOST)
    wait_for(lambda: _answers(first), "the first answer")
    _open_with_key(visitor.context.new_page(), first.url)
    tab = visitor.open(first.session(max_tokens=6))
    tab.box.fill("typed early")
    first.wait_ready()
    expect(tab.page.get_by_text("The model is loading.")).to_have_count(0)
    assert tab.box.input_value() == "typed early"
    tab.box.press("Enter")
    tab.idle(2)
    history, session = tab.texts(), tab.session()
    assert history[1] and len(first.messages(session)) == 2

    _end_in_mid_reply(first, tab)
    tab.box.fill("still typing")
    second = start(first.data_dir, port)
    expect(tab.page.get_by_text("The server is not answering. Trying again…")).to_be_hidden()
    second.wait_ready()
    tab.idle(4)
    expect(tab.page.get_by_text("The model is loading.")).to_have_count(0)
    assert tab.box.input_value() == "still typing"
    stored = second.messages(session)
    assert tab.texts()[:2] == history and stored[3]["content"].strip()
    assert tab.texts()[3].split()[: len(stored[3]["content"].split())] == stored[3]["content"].split()
    tab.page.reload()
    tab.ready()
    tab.idle(4)
    assert tab.session() == session and tab.texts()[:2] == history
    second.request("PATCH", f"/api/sessions/{session}", {"params": {"max_tokens": 4}})
    assert tab.ask("Go on.")
    assert len(second.messages(session)) == 6
    assert len(second.request("GET", "/api/sessions")["sessions"]) == 1


def free_port() -> int:
    """Below those that the system hands out: else a connection of anybody, the waiting page's own included, may get
    the number while no app has it."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def _open_with_key(page: Page, url: str) -> None:
    page.goto(url)
    assert page.locator("#kv-prompt").count() == 0
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_have_text("This is not the key.")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#kv-prompt textarea")).to_be_visible()


def _end_in_mid_reply(app: AppProcess, tab: ChatPage) -> None:
    app.request("PATCH", f"/api/sessions/{tab.session()}", {"params": {"max_tokens": 700, "ignore_eos": True}})
    tab.send("Tell me a long story.")
    tab.writing(10)
    assert app.stop(signal.SIGTERM) == 0
    expect(tab.page.get_by_text("The server is not answering. Trying again…")).to_be_visible()


def _answers(app: AppProcess) -> bool:
    try:
        return app.request("GET", "/health")["status"] in ("loading", "ok")
    except httpx.TransportError:
        return False
