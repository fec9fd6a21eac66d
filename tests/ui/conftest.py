import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.support.fake_chat import fake_chat
from tests.support.page_client import PageClient
from ui.page_routes import add_page_routes


@pytest.fixture
def page(tmp_path):
    """Opens pages on a server with a fast fake engine; `page.chat` is its conversation service."""
    chat = fake_chat(tmp_path / "chats.db", rate=400.0)
    api = FastAPI()
    live = add_page_routes(api, chat)
    yield PageClient(TestClient(api), chat)
    chat.close()
    live.panel.close()
    chat.store.close()
