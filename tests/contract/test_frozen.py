"""Routes of frozen prefixes."""

from __future__ import annotations

import pytest

from tests.contract.test_openai import assert_error
from tests.contract.test_sessions import UNKNOWN

TEXT = "You are a pirate. Answer in rhymes."


def test_freeze_list_delete(client):
    assert client.get("/api/frozen").json() == {"frozen": []}
    made = client.post("/api/frozen", json={"text": TEXT}).json()
    assert made["name"].startswith("you-are-a-pirate") and made["tokens"] > 0 and made["bytes"] > 0
    assert client.get("/api/frozen").json() == {"frozen": [made]}
    assert client.delete(f"/api/frozen/{made['name']}").status_code == 200
    assert client.get("/api/frozen").json() == {"frozen": []}
    assert_error(client.delete(f"/api/frozen/{made['name']}"), 404)


def test_a_sessions_system_prompt(client):
    session = client.post("/api/sessions", json={"system_prompt": TEXT}).json()["id"]
    by_session = client.post("/api/frozen", json={"session_id": session}).json()
    assert by_session == client.post("/api/frozen", json={"text": TEXT}).json()
    bare = client.post("/api/sessions").json()["id"]
    assert "empty" in assert_error(client.post("/api/frozen", json={"session_id": bare}), 400)["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ([], 400),
        ({"text": ""}, 400),
        ({"text": " \n"}, 400),
        ({"text": None}, 400),
        ({"text": 5}, 400),
        ({"text": "a", "session_id": UNKNOWN}, 400),
        ({"session_id": "x"}, 400),
        ({"session_id": None}, 400),
        ({"session_id": UNKNOWN}, 404),
    ],
)
def test_senseless_texts(client, body, status):
    assert_error(client.post("/api/frozen", json=body), status)


def test_half_a_character(client):
    answer = client.post("/api/frozen", content=b'{"text": "\\ud83d"}')
    assert "half a character" in assert_error(answer, 400)["message"]


@pytest.mark.parametrize("name", ["%00", "世界", "a" * 500, "..%5c.."])
def test_names_that_are_none(client, name):
    assert_error(client.delete(f"/api/frozen/{name}"), 404)


def test_while_the_model_loads(client, engine):
    engine.state = "loading"
    assert_error(client.get("/api/frozen"), 503)
    assert_error(client.post("/api/frozen", json={"text": TEXT}), 503)
