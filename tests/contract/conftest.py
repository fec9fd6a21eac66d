"""The real routes over the real store and conversation service; only the engine is a fake."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import uvicorn
from fastapi.testclient import TestClient

import app
from sessions.store import SessionStore
from tests.support.fake_engine import FakeEngine, wait_until
from ui.api.routes import build_api
from ui.chat import ChatService
from ui.network import open_socket, url_of
from ui.security import Security

LOCAL = "http://127.0.0.1:7860"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@contextmanager
def chat_over(folder: Path, engine: FakeEngine) -> Iterator[ChatService]:
    service = ChatService(SessionStore(folder / "chats.db"), engine)
    yield service
    service.close()
    service.store.close()


@contextmanager
def client_of(chat: ChatService) -> Iterator[TestClient]:
    guarded = Security(build_api(chat, lambda: ["fake-model", "other-model"]))
    with TestClient(guarded, base_url=LOCAL, raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture
def chat(tmp_path: Path, engine: FakeEngine) -> Iterator[ChatService]:
    with chat_over(tmp_path, engine) as opened:
        yield opened


@pytest.fixture
def client(chat: ChatService) -> Iterator[TestClient]:
    with client_of(chat) as opened:
        yield opened


@pytest.fixture(scope="module")
def standing_chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatService]:
    """One for all tests of a file that do not mind what others left in it."""
    with chat_over(tmp_path_factory.mktemp("chat"), FakeEngine()) as opened:
        yield opened


@pytest.fixture(scope="module")
def refusing(standing_chat: ChatService) -> Iterator[TestClient]:
    """One client for all requests of a file that are refused: none of them stores anything."""
    with client_of(standing_chat) as opened:
        yield opened
    assert not standing_chat.store.list()


@pytest.fixture
def session_id(client: TestClient) -> str:
    return str(client.post("/api/sessions").json()["id"])


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, caplog
) -> Callable[..., subprocess.CompletedProcess]:
    """What `test_command_line.run` gives, without a process of its own, whose imports take most of the time.

    For commands that end by themselves.
    """

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    def run(*arguments: object, **extra: str) -> subprocess.CompletedProcess:
        for name in [name for name in os.environ if name.startswith("KVSCOPE")]:
            monkeypatch.delenv(name)
        for name, value in {"KVSCOPE_DATA": str(tmp_path / "data"), **extra}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(app, "on_signals", lambda handler: None)
        monkeypatch.setattr(os, "_exit", leave)
        monkeypatch.setattr(sys, "argv", ["app.py", "--no-browser", *map(str, arguments)])
        capfd.readouterr(), caplog.clear()
        try:
            code = app.main()
        except SystemExit as end:
            code = end.code
        out, errors = capfd.readouterr()
        return subprocess.CompletedProcess(sys.argv, code, out, caplog.text + errors)

    return run


@pytest.fixture
def server_url(chat: ChatService) -> Iterator[str]:
    """A real server on a port of its own."""
    opened = open_socket("127.0.0.1", 0)
    config = uvicorn.Config(Security(build_api(chat)), log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[opened]), daemon=True)
    thread.start()
    assert wait_until(lambda: server.started)
    yield url_of(opened)
    server.should_exit = True
    thread.join(10)
