"""Gradio's own routes answer errors in the one shape of all routes."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from tests.contract.conftest import LOCAL
from tests.contract.test_openai import assert_error
from ui.api.routes import build_api
from ui.layout import mount
from ui.security import Security


@pytest.fixture(scope="module")
def client(standing_chat):
    """Building the page takes a second."""
    app = Security(mount(build_api(standing_chat), standing_chat))
    with TestClient(app, base_url=LOCAL, raise_server_exceptions=False) as opened:
        yield opened


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/gradio_api/nothing", 404),
        ("DELETE", "/gradio_api/info", 405),
        ("GET", "/gradio_api/queue/data", 400),
        ("GET", "/gradio_api/file=/etc/passwd", 403),
        ("POST", "/gradio_api/queue/join", 400),
        ("POST", "/gradio_api/upload", 400),
        ("GET", "/assets/none.js", 404),
        ("GET", "/nothing", 404),
    ],
)
def test_errors_of_the_page_have_the_shape_of_all_errors(client, method, path, status):
    """They were `{"detail": ...}`, with the path that was asked for in it."""
    body = {"json": {}} if method == "POST" else {}
    error = assert_error(client.request(method, path, **body), status)
    assert "passwd" not in error["message"]
    assert client.get("/").status_code == 200 and client.get("/config").status_code == 200
