"""Streams, stored texts and end tokens: what was sent, what is stored and what the model said are one text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from fastapi.testclient import TestClient

from engine.protocol import TokenDelta
from engine.tokenizer import ChatTokenizer
from engine.weights.catalog import ModelSource
from tests.support import tiny_tokenizer as tiny
from tests.support.chats import GREEDY, SCRIPTED, TinyChat, finished, tiny_chat
from ui.api.routes import build_api

TEXT = "A 世界 e\u0301 👩\u200d👩\u200d👧\u200d👦 🇫🇷 end"
FAMILY = TEXT.index("👩")
MERGED = ChatTokenizer(tiny.merged_byte_level(template=tiny.CHATML, eos_token="<|im_end|>"))
BYTES = tiny.chat_tokenizer()


def whole_part(data: bytes) -> str:
    """The text up to the last complete character."""
    return data.decode("utf-8", "ignore")


@pytest.fixture(params=["bytes", "merged"])
def chat(request, tmp_path):
    with tiny_chat(tmp_path, tokenizer=BYTES if request.param == "bytes" else MERGED) as opened:
        yield opened


def send_events(chat: TinyChat, session: str, content: str, **params) -> list[tuple[str, dict]]:
    """Events of a streamed turn over HTTP; each has to be UTF-8 and JSON by itself."""
    with TestClient(build_api(chat.service)) as api:
        body = {"content": content, "stream": True, "params": {"temperature": 0, **params}}
        answer = api.post(f"/api/sessions/{session}/messages", json=body)
    events = []
    for block in answer.content.split(b"\n\n")[:-1]:
        name, data = block.decode("utf-8").split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def test_the_stream_is_the_text_is_the_stored_text(chat):
    """C15: characters split over tokens came out as U+FFFD, or twice, in streams only."""
    ids = chat.ids(TEXT)
    assert len(ids) > 40
    session = chat.store.create().id
    chat.engine.script.append((*ids, *chat.ids("<|im_end|>")))
    events = send_events(chat, session, "Say it.")
    assert "".join(data["text"] for name, data in events if name == "token") == TEXT
    assert events[-1][0] == "done" and events[-1][1]["content"] == TEXT
    assert not any("\ufffd" in data["text"] for name, data in events if name == "token")
    assert chat.say(session, "Again.", (*ids, *chat.ids("<|im_end|>"))).text == TEXT
    for message in chat.store.branch(session).messages[1::2]:
        assert (message.content, message.token_ids) == (TEXT, ids)
    assert chat.engine.tokenizer.decode(ids) == TEXT
    stats = chat.say(session, "And?").stats
    assert stats.miss is None and stats.computed_tokens < 60


@pytest.mark.parametrize("stream", [False, True])
def test_over_the_openai_route_too(chat, stream):
    """C15 for clients: every chunk is valid JSON, and the chunks join to the whole."""
    chat.engine.script.append((*chat.ids(TEXT), *chat.ids("<|im_end|>")))
    with TestClient(build_api(chat.service)) as api:
        body = {"messages": [{"role": "user", "content": "Say it."}], "stream": stream}
        answer = api.post("/v1/chat/completions", json=body)
    if not stream:
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        return
    chunks = [json.loads(part.decode()[6:]) for part in answer.content.split(b"\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT


def test_a_cut_in_mid_character_ends_before_it(tmp_path):
    """C15: a reply cut inside an emoji ended in U+FFFD, or stored and streamed text differed from then on."""
    data = TEXT.encode()
    start = len(TEXT[:FAMILY].encode())
    with tiny_chat(tmp_path, context=2048) as chat:
        session = chat.store.create().id
        for length in (3, 5, 11, *range(start, start + 26, 3), len(data) - 6):
            chat.engine.script.append(chat.ids(TEXT))
            turn = chat.service.send(session, "Say it.", replace(SCRIPTED, max_tokens=length))
            view = finished(turn)
            streamed = "".join(event.text for event in turn._events if isinstance(event, TokenDelta))
            assert view.text == streamed == whole_part(data[:length]) and "\ufffd" not in view.text
            assert view.finish_reason == "length"
            assert chat.store.message(turn.message_id).content == view.text
            chat.assert_cache_is_history(turn)
        history = [message.content for message in chat.store.branch(session).messages]
        turn = chat.service.send(session, "Go on", replace(GREEDY, max_tokens=8))
        finished(turn)
        chat.assert_parity(turn)
    with tiny_chat(tmp_path, context=2048) as chat:
        assert [message.content for message in chat.store.branch(session).messages[: len(history)]] == history
        before = chat.service.prices.preview(session, "x").prompt_tokens
        chat.say(session, "x")
        assert chat.engine.requests[-1].prompt_ids[-1:] == chat.ids("\n") and before > 400


@pytest.mark.parametrize("family", ["<s>", "</s>"])
def test_bytes_of_a_sentencepiece_vocabulary_are_joined_alike(tmp_path, family):
    """C15's neighbour: <0xNN> tokens instead of a byte-level alphabet."""
    tokenizer = ChatTokenizer(tiny.sentencepiece_like(template=tiny.CHATML, eos_token=family))
    with tiny_chat(tmp_path, tokenizer=tokenizer) as chat:
        session = chat.store.create().id
        ids = tuple(tokenizer.encode_following(TEXT))
        chat.engine.script.append((*ids, *tokenizer.encode(family)))
        events = send_events(chat, session, "Say it.")
        joined = "".join(data["text"] for name, data in events if name == "token")
        assert joined == events[-1][1]["content"] == TEXT == chat.store.branch(session).messages[-1].content


# -- end tokens -----------------------------------------------------------------------------------------------------


def folder_tokenizer(folder: Path, generation: list[int] | int, config: list[int] | int | None) -> ChatTokenizer:
    """A model folder whose tokenizer names one end token and whose generation settings name others."""
    tiny.byte_level(template=tiny.CHATML, eos_token="<|endoftext|>").save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": config}))
    return ChatTokenizer.from_source(ModelSource(folder, "safetensors", "tiny"))


def assert_ends_at(chat: TinyChat, end: int) -> None:
    """A reply ends at `end`, unseen; the next turn has one end marker and reuses the reply."""
    session = chat.store.create().id
    view = chat.say(session, "Hi", (*chat.ids("Hello"), end, *chat.ids("assistant\nand on")))
    assert view.text == "Hello" and view.finish_reason == "stop" and view.token_ids == chat.ids("Hello")
    assert chat.store.branch(session).messages[-1].content == "Hello"
    first = chat.engine.requests[-1].prompt_ids
    stats = chat.say(session, "And?", "Bye<|im_end|>").stats
    assert stats.reused_tokens >= len(first) + len(view.token_ids) and stats.miss is None
    assert chat.prompt_text().count("Hello<|im_end|>\n<|im_start|>user\nAnd?") == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_any_of_several_end_tokens_ends_a_reply_in_any_order(tmp_path, order):
    """C17: only the first id of the list was honoured; replies ran on and printed the next speaker's turn."""
    names = ("<|endoftext|>", "<|eot_id|>", "</s>")
    ids = [BYTES.encode(names[index])[0] for index in order]
    tokenizer = folder_tokenizer(tmp_path, ids, ids[0])
    with tiny_chat(tmp_path, tokenizer=tokenizer) as chat:
        for end in (*ids, *BYTES.encode("<|im_end|>")):
            assert_ends_at(chat, end)


@pytest.mark.parametrize(("generation", "config"), [(0, None), (None, [0]), (None, 0)])
def test_end_tokens_of_either_file_count_as_one_id_or_as_a_list(tmp_path, generation, config):
    """C17's neighbours: the id stands alone, or only in the model's configuration."""
    end = BYTES.encode("<|eot_id|>")[0]
    tokenizer = folder_tokenizer(tmp_path, *(None if v is None else [end] if v else end for v in (generation, config)))
    with tiny_chat(tmp_path, tokenizer=tokenizer) as chat:
        assert_ends_at(chat, end)


@pytest.mark.parametrize("keys", [("eos", "eot"), ("eot", "eos")])
def test_both_end_keys_of_a_gguf_end_a_reply(tmp_path, keys):
    """C17: a file with different eos and eot keys stopped at one of them only."""
    reference = tiny.merged_byte_level()
    tokens = [reference.convert_ids_to_tokens(index) for index in range(len(reference))]
    special = set(tiny.SPECIAL)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(["T h"])
    writer.add_chat_template(tiny.CHATML)
    for key, name in zip(keys, ("<|endoftext|>", "<|eot_id|>"), strict=True):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokens.index(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = ChatTokenizer.from_source(ModelSource(tmp_path / "m.gguf", "gguf", "m"))
    with tiny_chat(tmp_path, tokenizer=tokenizer) as chat:
        for name in ("<|endoftext|>", "<|eot_id|>", "<|im_end|>"):
            assert_ends_at(chat, tokens.index(name))


def test_an_end_token_that_is_ignored_is_neither_shown_nor_an_end(tmp_path):
    """C17's neighbour: with `ignore_eos` the reply goes on, and the next prompt still holds its exact ids."""
    with tiny_chat(tmp_path) as chat:
        session = chat.store.create().id
        ids = chat.ids("Hello<|im_end|> again")
        chat.engine.script.append(ids)
        view = chat.send(session, "Hi", replace(GREEDY, max_tokens=len(ids)))
        assert view.text == "Hello again" and view.finish_reason == "length" and view.token_ids == ids
        stats = chat.say(session, "And?").stats
        assert (
            stats.miss is None
            and ids == chat.engine.requests[-1].prompt_ids[stats.reused_tokens - len(ids) + 1 :][: len(ids)]
        )
