"""Routes of the debugging view over the real store: tokens of a reply, and its diagnosis."""

from __future__ import annotations

import threading
import uuid

import pytest

from tests.support.fake_engine import wait_until


def say(client, session_id: str, text: str = "Hello there") -> dict:
    return client.post(f"/api/sessions/{session_id}/messages", json={"content": text}).json()


def test_the_tokens_of_the_last_reply_are_listed(client, chat, session_id):
    reply = say(client, session_id)
    stored = chat.store.message(reply["message"]["id"])
    found = client.get(f"/api/sessions/{session_id}/tokens?count=200").json()
    assert found["message_id"] == stored.id and found["same_prompt"] is True
    assert [token["token_id"] for token in found["tokens"]] == list(stored.token_ids)
    assert all(token["token"] == chat.engine.tokenizer.token_text(token["token_id"]) for token in found["tokens"])
    first = found["tokens"][0]
    assert first["index"] == 0 and first["position"] == reply["kvscope"]["prompt_tokens"]
    assert (first["entropy"], first["measured"], first["origin"]) == (1.5, "replay", "decode")


def test_what_was_measured_live_comes_first(client, chat, session_id):
    message_id = say(client, session_id)["message"]["id"]
    chat.store.save_measures(message_id, "fp16", [(-0.25, 0, 0.5, 0.75)] * 3)
    url = f"/api/sessions/{session_id}/tokens?message_id={message_id}&start=1&count=4"
    tokens = client.get(url).json()["tokens"]
    assert [token["measured"] for token in tokens] == ["live", "live", "replay", "replay"]
    assert [token["entropy"] for token in tokens] == [0.5, 0.5, 1.5, 1.5]
    assert [token["index"] for token in tokens] == [1, 2, 3, 4]
    # Without alternatives nothing has to be computed where all is measured.
    few = client.get(f"/api/sessions/{session_id}/tokens?count=3&alternatives=false").json()["tokens"]
    assert len(few) == 3 and all("top" not in token and token["entropy"] == 0.5 for token in few)
    # Numbers from a cache in another format are not those of this one.
    chat.store.save_measures(message_id, "int4", [(-0.25, 0, 0.5, 0.75)] * 3)
    assert client.get(url).json()["tokens"][0]["measured"] == "replay"


def test_certainty_is_what_was_measured_in_so_many_columns(client, chat, session_id):
    message_id = say(client, session_id)["message"]["id"]
    ids = chat.store.message(message_id).token_ids
    url = f"/api/sessions/{session_id}/certainty?message_id={message_id}"
    chat.store.save_measures(message_id, "fp16", [])
    assert client.get(url).json()["columns"] == client.get(url).json()["text"] == []
    measures = [(-0.25, 0, float(i), 1 / (i + 1)) for i in range(len(ids))]
    chat.store.save_measures(message_id, "fp16", measures)
    found = client.get(url).json()
    assert found["total"] == len(ids) and found["columns"] == [[i, i] for i in range(len(ids))]
    assert found["entropy"] == [float(i) for i in range(len(ids))]
    assert found["top1"] == [round(1 / (i + 1), 4) for i in range(len(ids))]
    assert found["text"] == [chat.engine.tokenizer.token_text(i) for i in ids]
    for columns in range(1, len(ids) + 2):
        few = client.get(f"{url}&columns={columns}").json()
        assert len(few["columns"]) == min(columns, len(ids)) and few["columns"][-1][1] == len(ids) - 1
        sizes = [last - first + 1 for first, last in few["columns"]]
        assert sum(sizes) == len(ids) and max(sizes) - min(sizes) <= 1
        weighed = sum(size * mean for size, mean in zip(sizes, few["entropy"], strict=True))
        assert weighed == pytest.approx(sum(range(len(ids))), abs=1e-3)


def test_certainty_is_refused_for_what_is_no_message_of_the_session(client, session_id):
    message_id = say(client, session_id)["message"]["id"]
    url = f"/api/sessions/{session_id}/certainty"
    other = client.post("/api/sessions").json()["id"]
    assert client.get(f"{url}?message_id={uuid.uuid4()}").status_code == 404
    assert client.get(f"/api/sessions/{other}/certainty?message_id={message_id}").status_code == 404
    for query in ("", "?message_id=x", f"?message_id={message_id}&columns=0", f"?message_id={message_id}&columns=513"):
        answer = client.get(url + query)
        assert answer.status_code in (400, 422) and answer.json()["error"]["message"], query


def test_a_diagnosis_gets_all_that_the_reply_was_made_with(client, chat, engine, session_id):
    params = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "max_tokens": 7}
    body = {"content": "Hi", "params": params}
    reply = client.post(f"/api/sessions/{session_id}/messages", json=body).json()
    chat.store.save_measures(reply["message"]["id"], "int8", [(-0.25, 0, 0.5, 0.75)])
    found = client.post(f"/api/sessions/{session_id}/diagnose", json={"max_tokens": 50}).json()
    assert found["verdict"] == "none" and found["message_id"] == reply["message"]["id"]
    query = engine.diagnosed[-1]
    assert (query.params.temperature, query.params.seed, query.params.repetition_penalty) == (0.9, 5, 1.2)
    assert query.params.max_tokens is None and query.max_tokens == 50
    assert query.kv_format == "int8" and len(query.measures) == 1
    assert query.prompt_ids == engine.requests[-1].prompt_ids
    assert query.reply_ids == chat.store.message(reply["message"]["id"]).token_ids


def test_measures_of_another_prompt_are_no_evidence(client, chat, engine, session_id):
    message_id = say(client, session_id)["message"]["id"]
    chat.store.save_measures(message_id, "fp16", [(-0.25, 0, 0.5, 0.75)])
    client.post(f"/api/sessions/{session_id}/diagnose")
    assert len(engine.diagnosed[-1].measures) == 1
    client.patch(f"/api/sessions/{session_id}", json={"system_prompt": "Be brief."})
    found = client.post(f"/api/sessions/{session_id}/diagnose").json()
    assert found["same_prompt"] is False and engine.diagnosed[-1].measures == ()


@pytest.mark.parametrize("route", ["tokens", "diagnose"])
def test_what_can_not_be_looked_at_is_told_so(client, route, session_id):
    def status(session: str, message_id: str | None = None) -> int:
        url = f"/api/sessions/{session}/{route}"
        extra = {} if message_id is None else {"message_id": message_id}
        response = client.get(url, params=extra) if route == "tokens" else client.post(url, json=extra)
        assert response.json()["error"]["message"]
        return response.status_code

    assert status(session_id) == 400  # no reply yet
    assert status(str(uuid.uuid4())) == 404
    assert status("x") == 400
    user = say(client, session_id)["user_message_id"]
    assert status(session_id, user) == 400
    assert status(session_id, str(uuid.uuid4())) == 404
    assert status(session_id, "x") == 400


@pytest.mark.parametrize("query", ["start=-1", "count=0", "count=257", "count=many", "start=9999999999999"])
def test_a_range_that_makes_no_sense_is_refused(client, session_id, query):
    say(client, session_id)
    assert client.get(f"/api/sessions/{session_id}/tokens?{query}").status_code == 400


def test_a_diagnosis_can_be_stopped_and_only_one_runs(client, engine, session_id):
    say(client, session_id)
    engine.delay_s = 0.01
    answers = []
    asking = threading.Thread(target=lambda: answers.append(client.post(f"/api/sessions/{session_id}/diagnose")))
    asking.start()
    assert wait_until(lambda: bool(engine.diagnosed))
    assert client.post(f"/api/sessions/{session_id}/diagnose").status_code == 409
    assert client.post(f"/api/sessions/{session_id}/diagnose/stop").json() == {"stopped": True}
    asking.join(10)
    assert answers[0].status_code == 409 and answers[0].json()["error"]["code"] == "stopped"
    assert client.post(f"/api/sessions/{session_id}/diagnose/stop").json() == {"stopped": False}


@pytest.mark.parametrize("act", ["audit", "repair"])
def test_an_audit_can_be_stopped_and_only_one_runs(client, engine, session_id, act):
    say(client, session_id)
    engine.holds_audits, answers = True, []
    asking = threading.Thread(target=lambda: answers.append(client.post(f"/api/sessions/{session_id}/{act}")))
    asking.start()
    assert wait_until(lambda: bool(engine.auditing))
    assert client.post(f"/api/sessions/{session_id}/audit").status_code == 409
    assert client.post(f"/api/sessions/{session_id}/audit/stop").json() == {"stopped": True}
    asking.join(10)
    assert answers[0].status_code == 409 and answers[0].json()["error"]["code"] == "stopped"
    assert client.post(f"/api/sessions/{session_id}/audit/stop").json() == {"stopped": False}
    assert client.post("/api/sessions/nonsense/audit/stop").status_code == 400
