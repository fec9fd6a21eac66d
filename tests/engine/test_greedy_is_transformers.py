"""Greedy decoding through the whole engine says, token for token, what transformers says of the same file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.loader import assemble
from engine.local import LocalEngine
from engine.models.registry import load_model
from engine.protocol import ChatMessage, Finished, GenerateRequest, TurnStats
from engine.sampling.params import SamplingParams
from engine.weights.catalog import ModelSource
from sessions.store import SessionStore
from tests.support.chats import finished
from tests.support.engines import RecordingEngine
from tests.support.reference_model import load_reference
from tests.support.tiny_models import save_gguf, save_safetensors, tiny_model
from tests.support.tiny_tokenizer import chat_tokenizer
from ui.chat import ChatService

TOKENS = 128
BLOCK = 16
DAY = datetime(2031, 1, 1)
TIE = 1e-4
"""Logits closer than this are equal in float32: sums in another order may swap them."""
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4)


def greedy(engine: LocalEngine, prompts: list[tuple[int, ...]], params: SamplingParams) -> list[tuple[int, ...]]:
    """Replies to all prompts, decoded at the same time."""
    replies = []
    for stream in [engine.generate(GenerateRequest(prompt, params)) for prompt in prompts]:
        ids: list[int] = []
        for event in stream:
            ids += getattr(event, "token_ids", ()) if not isinstance(event, Finished) else ()
        replies.append(tuple(ids))
    return replies


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_random_models_of_every_architecture(kind, tmp_path):
    """64 tokens from either container, on a fresh and on a warm cache, alone and beside another reply."""
    tokenizer = chat_tokenizer()
    reference = tiny_model(kind, vocab_size=tokenizer.vocab_size)
    prompts = [
        tuple(b"The quick brown fox jumps over the lazy dogs"),
        tuple(b"Paris is the capital of France, and Rome of "),
    ]
    with torch.no_grad():
        out = reference.generate(
            torch.tensor(prompts), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    expected = [tuple(row) for row in out[:, len(prompts[0]) :].tolist()]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for path in (save_gguf(reference, tmp_path / "m.gguf"), save_safetensors(reference, tmp_path / "folder")):
        model = load_model(path, torch.device("cpu"), "float32")
        config = EngineConfig(data_dir=tmp_path, block_size=4, kv_budget=2**24, snapshot_limit=0)
        engine = LocalEngine(config, lambda c, model=model: assemble(c, model, tokenizer, kind))
        engine.start()
        engine.wait_ready(30)
        assert greedy(engine, prompts[:1], params) == expected[:1]
        assert greedy(engine, prompts, params) == expected
        engine.check_integrity()
        engine.close()


# -- the default model ----------------------------------------------------------------------------------------------


@dataclass
class LongChat:
    """A chat of twenty turns and what each of them took."""

    engine: RecordingEngine
    service: ChatService
    session: str = ""
    requests: list[GenerateRequest] = field(default_factory=list)
    stats: list[TurnStats] = field(default_factory=list)
    replies: list[tuple[int, ...]] = field(default_factory=list)


@pytest.fixture(scope="module")
def file(default_model: ModelSource) -> Path:
    if default_model.kind != "gguf":
        pytest.skip("the default model came from the hub")
    return default_model.path


@pytest.fixture(scope="module")
def engine(file: Path) -> Iterator[RecordingEngine]:
    config = EngineConfig(file.parent, str(file), device="cpu", dtype="float32", block_size=BLOCK, snapshot_limit=0)
    engine = RecordingEngine(config)
    engine.requests, engine.script = [], []
    engine.start()
    engine.wait_ready(120)
    yield engine
    engine.check_integrity()
    engine.close()


@pytest.fixture(scope="module")
def reference(file: Path) -> PreTrainedModel:
    return load_reference(file)


@pytest.fixture(scope="module")
def chat(engine: RecordingEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LongChat]:
    store = SessionStore(tmp_path_factory.mktemp("chat") / "chats.db")
    opened = LongChat(engine, ChatService(store, engine))
    opened.session = store.create().id
    for index in range(20):
        question = f"Question {index + 1}: name something that begins with an A."
        view = finished(opened.service.send(opened.session, question, SHORT))
        opened.requests.append(engine.requests[-1])
        opened.stats.append(view.stats)
        opened.replies.append(view.token_ids)
    yield opened
    opened.service.close()
    store.close()


def assert_greedy(reference: PreTrainedModel, ids: tuple[int, ...], pieces: list[range]) -> None:
    """Each id at the given positions is what `reference` finds likeliest there, in one forward over all of them."""
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0]
    for positions in pieces:
        for position in positions:
            row = logits[position - 1]
            assert row.max() - row[ids[position]] < TIE, (
                f"position {position}: {ids[position]}, not {int(row.argmax())}"
            )


@pytest.mark.model
def test_five_prompts_of_the_default_model(engine, chat, reference):
    """128 tokens each; the last prompt is a chat of ten turns, whose nine replies are checked where they stand."""
    questions = ["Hello!", "What is the capital of France?", "Write a poem about the sea."]
    prompts = [engine.tokenizer.render([ChatMessage("user", text)], DAY).token_ids for text in questions]
    prompts.append(tuple(engine.tokenizer.encode("def fibonacci(n):", add_special_tokens=True)))
    prompts.append(chat.requests[9].prompt_ids)
    replies = greedy(engine, prompts, GREEDY)
    earlier = [
        range(len(request.prompt_ids), len(request.prompt_ids) + len(reply))
        for request, reply in zip(chat.requests[:9], chat.replies[:9], strict=True)
    ]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply) == TOKENS
        pieces = [range(len(prompt), len(prompt) + TOKENS), *(earlier if prompt is prompts[4] else ())]
        assert_greedy(reference, (*prompt, *reply), pieces)
    assert replies[4][: len(chat.replies[9])] == chat.replies[9]
    for request, reply in zip(chat.requests[:9], chat.replies[:9], strict=True):
        start = len(request.prompt_ids)
        assert prompts[4][:start] == request.prompt_ids and prompts[4][start : start + len(reply)] == reply
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([prompts[1]]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert tuple(out[0, len(prompts[1]) :].tolist()) == replies[1][:32]


@pytest.mark.model
def test_twenty_turns_each_compute_their_own_tokens_and_an_edit_what_follows_it(chat, reference):
    """A turn's cost grew with the chat; here it is the new question, whatever stands before it."""
    requests = chat.requests
    for index in range(1, 20):
        before = len(requests[index - 1].prompt_ids) + len(chat.replies[index - 1])
        new = len(requests[index].prompt_ids) - before
        stats = chat.stats[index]
        assert stats.miss is None and stats.reused_tokens >= before - 1
        assert stats.computed_tokens <= new + 1 + BLOCK
    assert len(requests[19].prompt_ids) > 500

    users = [message for message in chat.service.store.branch(chat.session).messages if message.role == "user"]
    view = finished(chat.service.edit(chat.session, users[9].id, users[9].content + " Just one word.", SHORT))
    tenth, edited = requests[9].prompt_ids, chat.engine.requests[-1].prompt_ids
    shared = next(i for i in range(len(edited)) if tenth[i] != edited[i])
    assert view.stats.reused_tokens >= shared - BLOCK and view.stats.computed_tokens <= 20 + BLOCK
    assert view.stats.miss.cause == "edit" and view.stats.miss.position == shared
    assert_greedy(reference, (*edited, *view.token_ids), [range(len(edited), len(edited) + len(view.token_ids))])
    back = finished(chat.service.edit(chat.session, users[9].id, users[9].content, SHORT))
    assert back.token_ids == chat.replies[9] and back.stats.computed_tokens <= 20 + BLOCK
