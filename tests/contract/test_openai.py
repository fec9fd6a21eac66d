"""The OpenAI-compatible routes: shapes, limits and the whole kinds of malformed requests."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.errors import NonFiniteValues
from engine.sampling.beam import BeamParams
from tests.support.fake_engine import reply_text

ASK = {"messages": [{"role": "user", "content": "Hello there, tell me something long enough for two blocks."}]}


def post(client, body: Any, path: str = "/v1/chat/completions"):
    return client.post(path, json=body)


def assert_error(response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "code"}
    assert all(isinstance(value, str) and value for value in error.values())
    assert "Traceback" not in error["message"] and "/work" not in error["message"]
    return error


def chunks_of(response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_an_answer_has_the_shape_clients_expect(client, engine):
    body = post(client, {**ASK, "seed": 5, "model": "fake-model"}).json()
    assert body["object"] == "chat.completion" and body["model"] == "fake-model"
    [choice] = body["choices"]
    text = reply_text(engine.requests[0].prompt_ids, 5)
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len(text.encode()) and usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert set(body["kvscope"]) == {
        "session_id", "cache_pos", "prompt_tokens", "reused_tokens", "computed_tokens", "generated_tokens", "ttft_ms",
        "prefill_ms", "decode_tokens_per_s", "finish_reason", "seed", "miss", "loop", "violation",
        "drafted_tokens", "accepted_tokens",
    }  # fmt: skip
    assert body["kvscope"]["seed"] == 5 and body["kvscope"]["session_id"] is None


def test_a_second_call_says_what_it_reused(client):
    post(client, ASK)
    usage = post(client, ASK).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_a_stream_is_the_answer_in_pieces(client):
    whole = post(client, {**ASK, "seed": 5}).json()
    options = {"include_usage": True}
    chunks = chunks_of(post(client, {**ASK, "seed": 5, "stream": True, "stream_options": options}))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    assert chunks[-1]["kvscope"]["seed"] == 5 and chunks[-2]["kvscope"]["seed"] == 5
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_without_include_usage_the_last_chunk_carries_the_numbers(client):
    chunks = chunks_of(post(client, {**ASK, "stream": True}))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["kvscope"]["finish_reason"] == "stop"
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 9}, 5),
        ({"max_tokens": None, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 1}, 1),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_both_names_of_the_limit_hold(client, limits, count, stream):
    response = post(client, {**ASK, **limits, "stream": stream, "stream_options": {"include_usage": True}})
    body = chunks_of(response)[-1] if stream else response.json()
    assert body["usage"]["completion_tokens"] == count and body["kvscope"]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, "5", 5.0, 5.5, True, [5], {}, 2**40])
def test_limits_that_make_no_sense_are_refused(refusing, name, value):
    assert name in assert_error(post(refusing, {**ASK, name: value}), 400)["message"]


@pytest.mark.parametrize("role", ["tool", "function", "ipython", "", "User", None])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("in_session", [False, True])
def test_a_role_that_is_not_supported_is_refused_before_anything_is_stored(client, session_id, role, path, in_session):
    """A tool's message was stored, though no model here calls tools."""
    messages = [{"role": "system", "content": "New."}, {"role": role, "content": "42"}, *ASK["messages"]]
    body = {"messages": messages, **({"session_id": session_id} if in_session else {})}
    error = assert_error(post(client, body, path), 400)
    assert error["message"].startswith("messages[1].role must be one of system, developer, user, assistant")
    assert ("tools are not supported" in error["message"]) == (role in ("tool", "function"))
    stored = client.get(f"/api/sessions/{session_id}").json()
    assert stored["messages"] == [] and stored["system_prompt"] == ""


def test_a_refused_conversation_leaves_the_system_prompt_of_its_session(client, session_id):
    """It was stored before the rest of the request was looked at."""
    messages = [{"role": "system", "content": "New."}, *ASK["messages"]]
    body = {"messages": messages, "session_id": session_id, "logit_bias": {"99999": 1}}
    assert_error(post(client, body), 400)
    stored = client.get(f"/api/sessions/{session_id}").json()
    assert stored["messages"] == [] and stored["system_prompt"] == ""
    assert post(client, {"messages": messages, "session_id": session_id}).status_code == 200
    assert client.get(f"/api/sessions/{session_id}").json()["system_prompt"] == "New."


BOUNDS = {
    "max_tokens": ("1", "2147483647"), "max_completion_tokens": ("1", "2147483647"), "seed": ("0", str(2**63 - 1)),
    "temperature": ("0", "100"), "top_p": ("0", "1"), "min_p": ("0", "1"), "top_k": ("0", str(2**31)),
    "repetition_penalty": ("0.01", "100"), "presence_penalty": ("-100", "100"), "frequency_penalty": ("-100", "100"),
    "n": ("1", "8"), "top_logprobs": ("0", "20"),
}  # fmt: skip


@pytest.mark.parametrize("value", [-(10**5), 2**31, 2**63, 2**64, -(2**64), 10**39, "5", [5]], ids=str)
@pytest.mark.parametrize("name", BOUNDS)
def test_a_refused_number_is_told_its_bounds(refusing, name, value):
    """`max_tokens` of 2**31 had to be "at least 1", and greater ones were "too large": for what was not said."""
    if name in ("seed", "top_k") and value == 2**31:
        pytest.skip("that is a value")
    body = {**ASK, "logprobs": True, name: value}
    low, high = BOUNDS[name]
    message = assert_error(post(refusing, body), 400)["message"]
    assert re.match(rf"{name} must be a (whole )?number from {low} to {high}, not .+\.$", message), message


@pytest.mark.parametrize("bias", [{"5": 1e5}, {"5": -(10**30)}, {"5": "1"}, {"5": True}], ids=str)
def test_a_refused_bias_is_told_its_bounds(refusing, bias):
    message = assert_error(post(refusing, {**ASK, "logit_bias": bias}), 400)["message"]
    assert "from -10000 to 10000" in message


def test_numbers_beyond_any_setting_are_refused_with_a_limit(refusing):
    for number, limit in (("1" * 41, "40 digits"), ("1e999", "1.8e+308")):
        raw = json.dumps({**ASK, "seed": 0}).replace('"seed": 0', f'"seed": {number}')
        response = refusing.post("/v1/chat/completions", content=raw)
        assert limit in assert_error(response, 400)["message"]


def test_logprobs_of_a_completion_are_refused_by_their_own_name(client):
    response = post(client, {"prompt": "a", "logprobs": 21}, "/v1/completions")
    assert assert_error(response, 400)["message"] == "logprobs must be a whole number from 0 to 20, not 21."


@pytest.mark.parametrize("stop", ["gamma", ["gamma"], ["nothing", "gamma"], ["gamma", "gam"]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_takes_text_or_a_list(client, engine, stop, stream):
    post(client, ASK)
    prompt_ids = engine.requests[0].prompt_ids
    seed = next(seed for seed in range(99) if " gamma" in reply_text(prompt_ids, seed))
    text = reply_text(prompt_ids, seed)
    response = post(client, {**ASK, "seed": seed, "stop": stop, "stream": stream})
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks_of(response)]
        shown, reason = "".join(c["delta"].get("content", "") for c in choices), choices[-1]["finish_reason"]
    else:
        [choice] = response.json()["choices"]
        shown, reason = choice["message"]["content"], choice["finish_reason"]
    assert shown == text[: text.index("gam")] and reason == "stop"


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": "hot"}, {"temperature": -1}, {"temperature": True}, {"temperature": [0.5]}, {"top_p": 1.5},
        {"top_p": {}}, {"top_k": 1.5}, {"top_k": -1}, {"min_p": 2}, {"seed": "x"}, {"seed": 1.5}, {"seed": -1},
        {"stop": 5}, {"stop": [5]}, {"stop": [""]}, {"stop": ["a"] * 17}, {"stop": {"a": 1}}, {"logit_bias": []},
        {"logit_bias": {"x": 1}}, {"logit_bias": {"1": "a"}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": None}},
        {"strip_thoughts": 1}, {"strip_thoughts": "yes"},
        {"logit_bias": {"99999": 1}}, {"ignore_eos": 1}, {"n": 0}, {"n": 9}, {"n": "2"}, {"n": True}, {"n": 1.0},
        {"stream": "yes"}, {"stream": 1}, {"stream_options": []}, {"stream_options": {"include_usage": 1}},
        {"logprobs": 1}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": "3"},
        {"top_logprobs": 3}, {"logprobs": True, "top_logprobs": -1}, {"presence_penalty": "a"},
        {"frequency_penalty": 1e9}, {"repetition_penalty": 0}, {"model": 5}, {"session_id": 5}, {"session_id": "abc"},
        {"messages": None}, {"messages": []}, {"messages": "hi"}, {"messages": {}}, {"messages": ["hi"]},
        {"messages": [{"content": "x"}]}, {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_senseless_fields_get_400(refusing, change, stream):
    assert_error(post(refusing, {**ASK, "stream": stream, **change}), 400)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}',
     b'{"a":1e999}', b'{"a":' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"messages":' + b"[" * 50_000],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/api/sessions/import"])
def test_what_is_no_json_object_gets_400(refusing, raw, path):
    assert_error(refusing.post(path, content=raw), 400)


def test_a_body_that_is_too_large_gets_413(refusing):
    assert_error(refusing.post("/v1/chat/completions", content=b"x" * (9 << 20)), 413)
    assert_error(refusing.post("/v1/chat/completions", content=(b"x" * (1 << 20) for _ in range(9))), 413)


def test_parts_mean_their_text_joined_by_line_feeds(client, engine):
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    for content in (parts, "A\nB"):
        assert post(client, {"messages": [{"role": "user", "content": content}]}).status_code == 200
    assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids


def test_null_content_is_empty_and_unknown_fields_are_ignored(client, engine):
    plain = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ]
    odd = [
        {"role": "user", "content": "a", "name": "me", "unknown": {}},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {}}]},
    ]
    assert post(client, {"messages": plain}).status_code == 200
    assert post(client, {"messages": odd, "user": "x", "tools": None, "unheard_of": [1]}).status_code == 200
    assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids


def test_an_assistant_message_at_the_end_is_continued(client, engine):
    messages = [*ASK["messages"], {"role": "assistant", "content": "Once upon"}]
    body = post(client, {"messages": messages}).json()
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_ids)
    assert prompt.endswith("Once upon")
    assert not body["choices"][0]["message"]["content"].startswith("Once")


@pytest.mark.parametrize("strip", [True, False])
def test_thoughts_of_earlier_replies_are_left_out_where_that_is_asked(client, engine, strip):
    turns = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "<think>hm</think>Paris."}]
    begun = {"role": "assistant", "content": "<think>hm</think>I am"}
    for last in ({"role": "user", "content": "Sure?"}, begun):
        messages = [*turns, {"role": "user", "content": "Sure?"}, begun] if last is begun else [*turns, last]
        answer = client.post("/v1/chat/completions", json={"messages": messages, "strip_thoughts": strip})
        assert answer.status_code == 200
        prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
        assert "Paris." in prompt and prompt.count("<think>") == (0 if strip else 1) + (last is begun)


def test_a_developer_message_is_a_system_message(client, engine):
    for role in ("system", "developer"):
        post(client, {"messages": [{"role": role, "content": "Be brief."}, *ASK["messages"]]})
    assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids


def test_choices_share_the_prompt_and_have_seeds_of_their_own(client, engine):
    body = post(client, {**ASK, "n": 3, "seed": 7}).json()
    prompt_ids = engine.requests[0].prompt_ids
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == [reply_text(prompt_ids, seed) for seed in (7, 8, 9)]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == len(prompt_ids)
    assert body["usage"]["completion_tokens"] == sum(len(text.encode()) for text in texts)


def test_choices_without_a_seed_differ(client):
    choices = post(client, {**ASK, "n": 2}).json()["choices"]
    assert choices[0]["message"]["content"] != choices[1]["message"]["content"]


def test_streamed_choices_keep_their_index(client, engine):
    chunks = chunks_of(post(client, {**ASK, "n": 2, "seed": 7, "stream": True}))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {i: reply_text(engine.requests[0].prompt_ids, 7 + i) for i in (0, 1)}
    assert "kvscope" in chunks[-1] and sum("kvscope" in chunk for chunk in chunks) == 1


def test_models(client):
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["fake-model", "other-model"]
    assert [model["loaded"] for model in listed["data"]] == [True, False]
    assert client.get("/v1/models/other-model").json()["object"] == "model"
    assert assert_error(client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"


def test_default_names_the_loaded_model(client):
    body = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
    assert client.post("/v1/chat/completions", json=body).json()["model"] == "fake-model"


def test_an_empty_message_to_a_session_is_refused(client):
    session = client.post("/api/sessions").json()["id"]
    for content in ("", "  \n"):
        body = {"session_id": session, "messages": [{"role": "user", "content": content}]}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == "The message is empty."
    assert client.get(f"/api/sessions/{session}").json()["messages"] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", ["gpt-4", "other-model", "../x", "\ud800"])
def test_an_unknown_model_gets_404(refusing, path, name):
    body = json.dumps({**ASK, "prompt": "x", "model": name})
    assert assert_error(refusing.post(path, content=body), 404)["code"] == "model_not_found"


def test_log_probabilities_of_chat(client):
    body = post(client, {**ASK, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == 3 and all(len(item["top_logprobs"]) == 2 for item in content)
    assert "".join(item["token"] for item in content) == body["choices"][0]["message"]["content"]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    bare = post(client, {**ASK, "logprobs": True, "max_tokens": 1}).json()["choices"][0]["logprobs"]["content"]
    assert bare[0]["top_logprobs"] == []


def test_completions_take_text_and_ids(client, engine):
    ids = engine.tokenizer.encode("Once upon a time", add_special_tokens=True)
    texts = []
    for prompt in ("Once upon a time", ids, ["Once upon a time"], [ids]):
        body = post(client, {"prompt": prompt, "seed": 1}, "/v1/completions").json()
        assert body["object"] == "text_completion"
        assert body["usage"]["completion_tokens"] == 16  # like OpenAI's, it is short unless told otherwise
        texts.append(body["choices"][0]["text"])
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], [[]], "", ["a", "b"], [[1], [2]], [1, "a"], [True], [1.0], [-1], [10**6], [2**62]]
)
def test_prompts_that_make_no_sense_are_refused(refusing, prompt):
    assert_error(post(refusing, {"prompt": prompt}, "/v1/completions"), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_answer(client, engine, stream):
    asked = {"prompt": "Once 世界", "echo": True, "seed": 1, "max_tokens": 400, "stream": stream}
    response = post(client, asked, "/v1/completions")
    body = chunks_of(response) if stream else [response.json()]
    text = "".join(part["choices"][0]["text"] for part in body)
    assert text == "Once 世界" + reply_text(engine.requests[0].prompt_ids, 1)
    assert_error(post(client, {**asked, "logprobs": 1}, "/v1/completions"), 400)
    assert_error(post(client, {**asked, "echo": "yes"}, "/v1/completions"), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_completions(client, stream):
    response = post(client, {"prompt": "a", "logprobs": 2, "max_tokens": 4, "stream": stream}, "/v1/completions")
    parts = [part["choices"][0]["logprobs"] for part in (chunks_of(response) if stream else [response.json()])]
    parts = [part for part in parts if part is not None]
    tokens = [token for part in parts for token in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert len(tokens) == 4 and offsets == [0, 1, 2, 3]
    assert all(len(top) == 2 for part in parts for top in part["top_logprobs"])


def test_a_prompt_that_does_not_fit_names_the_limit(client, engine):
    engine.context = 40
    for stream in (False, True):
        error = assert_error(post(client, {**ASK, "stream": stream}), 400)
        assert error["code"] == "context_length_exceeded" and "40" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_fails_is_an_error_object(client, engine, stream):
    engine.fail_with = NonFiniteValues("The model produced values that are not finite.")
    response = post(client, {**ASK, "stream": stream})
    if stream:
        last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "non_finite_values" and "[DONE]" not in response.text
    else:
        assert assert_error(response, 500)["code"] == "non_finite_values"


def test_a_turn_of_a_session_is_stored(client, session_id):
    asked = {**ASK, "session_id": session_id, "seed": 3}
    body = post(client, asked).json()
    assert body["kvscope"]["session_id"] == session_id
    stored = client.get(f"/api/sessions/{session_id}").json()["messages"]
    assert [message["role"] for message in stored] == ["user", "assistant"]
    assert stored[1]["content"] == body["choices"][0]["message"]["content"]
    follow = [*ASK["messages"], body["choices"][0]["message"], {"role": "user", "content": "And?"}]
    chunks = chunks_of(post(client, {"messages": follow, "session_id": session_id, "stream": True}))
    assert chunks[-1]["kvscope"]["reused_tokens"] >= body["kvscope"]["cache_pos"] - 1
    assert len(client.get(f"/api/sessions/{session_id}").json()["messages"]) == 4


def test_a_session_that_is_unknown_or_malformed(client, session_id):
    unknown = "00000000-0000-4000-8000-000000000000"
    assert_error(post(client, {**ASK, "session_id": unknown}), 404)
    assert_error(post(client, {**ASK, "session_id": "not-a-uuid"}), 400)
    assert_error(post(client, {**ASK, "session_id": session_id, "n": 2}), 400)
    last = [*ASK["messages"], {"role": "assistant", "content": "x"}]
    assert_error(post(client, {"messages": last, "session_id": session_id}), 400)


def test_half_characters_do_no_harm(client):
    raw = b'{"messages":[{"role":"user","content":"a \\ud800 b"}]}'
    assert client.post("/v1/chat/completions", content=raw).status_code == 200
    raw = b'{"prompt":"a \\ud800 b","echo":true}'
    assert client.post("/v1/completions", content=raw).status_code == 200


@pytest.mark.parametrize("state", ["loading", "stopped"])
def test_without_an_engine_the_answer_is_503(client, engine, state):
    engine.state = state
    assert_error(post(client, ASK), 503)
    assert_error(post(client, {**ASK, "stream": True}), 503)
    assert client.get("/v1/models").json()["data"][0]["loaded"] is False


# -- beams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_beams_reach_the_engine(client, engine, path, stream):
    ask = ASK if path.endswith("chat/completions") else {"prompt": "Hello"}
    beams = {"num_beams": 4, "length_penalty": 2, "early_stopping": True}
    response = post(client, {**ask, **beams, "stream": stream}, path)
    assert response.status_code == 200, response.text
    assert engine.requests[-1].beams == BeamParams(4, 2, True)
    post(client, ask, path)
    assert not engine.requests[-1].beams.searches


def test_beams_reach_the_engine_in_a_sessions_turn(client, engine, session_id):
    assert post(client, {**ASK, "session_id": session_id, "num_beams": 3}).status_code == 200
    assert engine.requests[-1].beams.num_beams == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 0},
        {"num_beams": 9},
        {"num_beams": "4"},
        {"num_beams": 10**50},
        {"num_beams": 2, "length_penalty": "long"},
        {"num_beams": 2, "length_penalty": 1e6},
        {"num_beams": 2, "early_stopping": "soon"},
        {"num_beams": 2, "n": 2},
        {"num_beams": 2, "logprobs": True},
        {"num_beams": 2, "presence_penalty": 1},
        {"num_beams": 2, "logit_bias": {"5": 1}},
    ],
)
def test_beam_settings_that_make_no_sense_are_refused_before_anything_is_stored(client, engine, session_id, settings):
    assert_error(post(client, {**ASK, **settings}), 400)
    assert_error(post(client, {**ASK, **settings, "session_id": session_id}), 400)
    assert engine.requests == [] and client.get(f"/api/sessions/{session_id}").json()["messages"] == []
