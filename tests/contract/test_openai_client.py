"""The official Python client, unchanged, against a real server on the loopback interface."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.support.fake_engine import reply_text

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture
def ai(server_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_whole_and_streamed(ai, engine):
    model = ai.models.list().data[0].id
    assert ai.models.retrieve(model).id == model
    whole = ai.chat.completions.create(model=model, messages=MESSAGES, seed=3, temperature=0.5)
    text = reply_text(engine.requests[0].prompt_ids, 3)
    assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert whole.model_extra["kvscope"]["seed"] == 3
    options = {"include_usage": True}
    stream = ai.chat.completions.create(
        model=model, messages=MESSAGES, seed=3, stream=True, stream_options=options, logprobs=True, top_logprobs=2
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert chunks[1].choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.25


def test_completions(ai, engine):
    whole = ai.completions.create(model="fake-model", prompt="Once", max_tokens=5, seed=1, logprobs=1, stop=["zz"])
    assert whole.choices[0].finish_reason == "length" and len(whole.choices[0].logprobs.tokens) == 5
    stream = ai.completions.create(model="fake-model", prompt="Once", max_tokens=5, seed=1, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_the_stream_helper_puts_a_message_together(ai, engine):
    with ai.chat.completions.stream(model="fake-model", messages=MESSAGES, seed=2) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == reply_text(engine.requests[0].prompt_ids, 2)


def test_a_session_by_extra_body(ai, chat):
    session = chat.store.create()
    answer = ai.chat.completions.create(model="fake-model", messages=MESSAGES, extra_body={"session_id": session.id})
    assert answer.model_extra["kvscope"]["session_id"] == session.id
    assert len(chat.store.branch(session.id).messages) == 2


def test_errors_become_the_clients_own(ai, engine):
    with pytest.raises(openai.NotFoundError) as caught:
        ai.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        ai.chat.completions.create(model="fake-model", messages=[])
    engine.state = "stopped"
    with pytest.raises(openai.InternalServerError):
        ai.chat.completions.create(model="fake-model", messages=MESSAGES)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_async_client(server_url, anyio_backend):
    async with openai.AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="fake-model", messages=MESSAGES, n=2, stream=True)
        indexes = {choice.index async for chunk in stream for choice in chunk.choices}
    assert indexes == {0, 1}
