"""Frozen prefixes: the first turn of a chat computes only its own tokens, and the same tokens come out."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ContextOverflow, InvalidRequest, NotFound, StorageFailed
from engine.protocol import ChatMessage, Finished, GenerateRequest
from engine.sampling.params import SamplingParams
from engine.tiers import fingerprint as fingerprints
from engine.tiers.frozen_text import prefix_ids
from engine.tokenizer import ChatTokenizer
from tests.support.chats import BLOCK, tiny_chat
from tests.support.engines import RecordingEngine, run, tiny_engine
from tests.support.tiny_tokenizer import CHATML, LLAMA3, byte_level, chat_tokenizer, merged_byte_level

A, B = (str(uuid.UUID(int=number)) for number in (1, 2))
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
TEXT = "You are a helpful assistant and know this document: 世界, the quick brown fox jumps over the lazy dog."
DAY = datetime(2026, 5, 4)


@contextmanager
def engine_over(folder: Path, **options: Any) -> Iterator[RecordingEngine]:
    engine = tiny_engine(**{"data_dir": folder, **options})
    try:
        yield engine
        engine.check_integrity()
    finally:
        engine.close()


def prompt_of(engine: RecordingEngine, question: str = "Who are you?", system: str = TEXT) -> tuple[int, ...]:
    return engine.tokenizer.render((ChatMessage("system", system), ChatMessage("user", question)), DAY).token_ids


def first_turn(engine: RecordingEngine, session: str | None = A, **prompt: str) -> Finished:
    last = run(engine, GenerateRequest(prompt_of(engine, **prompt), GREEDY, session))[-1]
    assert isinstance(last, Finished), last
    return last


@pytest.fixture
def frozen(tmp_path: Path) -> dict[str, Any]:
    with engine_over(tmp_path) as engine:
        return engine.freeze(TEXT)


@pytest.fixture
def fresh(tmp_path: Path) -> Finished:
    with engine_over(tmp_path / "elsewhere") as engine:
        return first_turn(engine)


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "int8"])
def test_the_first_turn_after_a_start_computes_only_its_own_tokens(tmp_path: Path, kv_format: str) -> None:
    with engine_over(tmp_path / "elsewhere", kv_format=kv_format) as engine:
        expected = first_turn(engine)
        assert expected.stats.reused_tokens == 0
    with engine_over(tmp_path, kv_format=kv_format) as engine:
        entry = engine.freeze(TEXT)
        ids = prefix_ids(engine.tokenizer, TEXT)
        assert ids == prompt_of(engine)[: len(ids)] and len(ids) - BLOCK < entry["tokens"] <= len(ids)
    with engine_over(tmp_path, kv_format=kv_format) as engine:
        assert engine.frozen() == [entry] and entry["bytes"] > 0 and entry["refused"] is None
        assert engine.cached_prefix(None, prompt_of(engine)) == entry["tokens"], "the preview knows it"
    with engine_over(tmp_path, kv_format=kv_format) as engine:
        assert engine.metrics()["blocks_used"] == 0, "nothing is loaded before it is wanted"
        last = first_turn(engine)
        assert last.stats.reused_tokens == entry["tokens"] >= len(ids) - BLOCK
        assert last.token_ids == expected.token_ids and last.stats.miss is None


def test_another_prompt_loads_nothing(tmp_path: Path, frozen: dict[str, Any]) -> None:
    with engine_over(tmp_path) as engine:
        last = first_turn(engine, system="Something else altogether.")
        assert last.stats.reused_tokens == 0 and engine.metrics()["blocks_used"] < frozen["tokens"] // BLOCK


def test_a_text_that_goes_on_shares_what_is_equal(tmp_path: Path, frozen: dict[str, Any]) -> None:
    """A file ends in a line feed, the pasted text does not; a document is followed by instructions."""
    with engine_over(tmp_path) as engine:
        stats = first_turn(engine, system=TEXT + " Answer in one sentence.").stats
        assert frozen["tokens"] - stats.reused_tokens < len("<|im_end|>\n<|im_start|>user\n") and stats.reused_tokens


def test_two_sessions_share_its_blocks(tmp_path: Path, frozen: dict[str, Any]) -> None:
    with engine_over(tmp_path) as engine:
        for session, question in ((A, "Who are you?"), (B, "What is this?")):
            assert first_turn(engine, session, question=question).stats.reused_tokens == frozen["tokens"]

        def owners() -> set[tuple[int, str | None]]:
            cache = engine._steps().prefix_cache
            path = cache.match(prompt_of(engine))[: frozen["tokens"] // BLOCK]
            return {(cache.pool.ref_count(node.block_ids[0]), node.session_id) for node in path}

        assert engine._call(owners) == {(3, None)}
        engine.release(A)
        assert engine._call(owners) == {(2, None)}
        engine.release(B)
        assert engine._call(owners) == {(1, None)}, "the tree's own"


def test_evicted_and_loaded_again(tmp_path: Path) -> None:
    with engine_over(tmp_path, blocks=120, context=256) as engine:
        frozen = engine.freeze(TEXT)
        run(engine, GenerateRequest(tuple(range(20, 240)), SamplingParams(temperature=0, max_tokens=2), A))
        run(engine, GenerateRequest(tuple(range(30, 240)), SamplingParams(temperature=0, max_tokens=2), A))
        cache = engine._steps().prefix_cache
        assert len(engine._call(lambda: cache.match(prompt_of(engine)))) < frozen["tokens"] // BLOCK
        assert first_turn(engine, B).stats.reused_tokens == frozen["tokens"]


@pytest.mark.parametrize("place", ["segment", "manifest"])
def test_a_flipped_byte_is_told_once_and_the_turn_is_right(
    tmp_path: Path, frozen: dict[str, Any], fresh: Finished, place: str, caplog
) -> None:
    [file] = (tmp_path / "frozen" / frozen["name"]).glob(f"{place}*")
    data = bytearray(file.read_bytes())
    data[len(data) - 40] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING), engine_over(tmp_path) as engine:
        last = first_turn(engine)
        assert last.stats.reused_tokens == 0 and last.token_ids == fresh.token_ids
        first_turn(engine, B)
        assert "damaged" in engine.frozen()[0]["refused"]
        [record] = caplog.records
        assert frozen["name"] in record.getMessage() and "damaged" in record.getMessage()
        assert engine.freeze(TEXT)["refused"] is None, "frozen anew it is whole again"
    with engine_over(tmp_path) as engine:
        assert first_turn(engine).stats.reused_tokens == frozen["tokens"]


OTHERS = {"weights": {"kind": "qwen2"}, "KV format": {"kv_format": "fp16"}, "block size": {"block_size": 8}}


@pytest.mark.parametrize("field", [*OTHERS, "engine version"])
def test_what_does_not_fit_is_ignored_naming_the_field(
    tmp_path: Path, frozen: dict[str, Any], field: str, caplog, monkeypatch
) -> None:
    options = OTHERS.get(field, {})
    with engine_over(tmp_path / "elsewhere", **options) as engine:
        expected = first_turn(engine)
    if not options:
        real = fingerprints.fingerprint
        monkeypatch.setattr("engine.lane.fingerprint", lambda parts: {**real(parts), field: "another"})
    with caplog.at_level(logging.WARNING), engine_over(tmp_path, **options) as engine:
        [record] = caplog.records
        assert f"The snapshot's {field} is " in record.getMessage() and frozen["name"] in record.getMessage()
        last = first_turn(engine)
        assert last.stats.reused_tokens == 0 and last.token_ids == expected.token_ids
        assert len(caplog.records) == 1 and f"{field} is " in engine.frozen()[0]["refused"]


def test_another_template_and_back(tmp_path: Path, frozen: dict[str, Any]) -> None:
    with engine_over(tmp_path) as engine:
        own = engine.capabilities()["chat_template"]
        engine.use_template("plain")
        assert "chat template" in engine.frozen()[0]["refused"]
        engine.use_template(own)
        assert engine.frozen()[0]["refused"] is None
        assert first_turn(engine).stats.reused_tokens == frozen["tokens"]


def test_wrong_values_that_verify_are_found_by_the_spot_audit(tmp_path: Path, fresh: Finished) -> None:
    with engine_over(tmp_path) as engine:
        name = engine.freeze(TEXT)["name"]
        ids = prefix_ids(engine.tokenizer, TEXT)
        blocks = engine._call(lambda: engine._steps().export_prefix(ids))
        blocks.tensors["data"] = blocks.tensors["data"].flip(0)
        engine._frozen.save(name, ids, blocks, BLOCK, engine._steps().fingerprint)
    with engine_over(tmp_path) as engine:
        last = first_turn(engine)
        assert last.stats.reused_tokens == 0 and last.token_ids == fresh.token_ids
        assert "differ from what the model computes there" in engine.frozen()[0]["refused"]


def test_deleted_from_disk_and_from_the_tree(tmp_path: Path, frozen: dict[str, Any]) -> None:
    with engine_over(tmp_path) as engine:
        first_turn(engine, A)
        engine.release(A)
        engine.unfreeze(frozen["name"])
        assert engine.frozen() == [] and engine.metrics()["blocks_used"] == 0
        assert not (tmp_path / "frozen" / frozen["name"]).exists()
        assert first_turn(engine).stats.reused_tokens == 0
        for name in (frozen["name"], "../frozen", ""):
            with pytest.raises(NotFound):
                engine.unfreeze(name)


def test_what_can_not_be_frozen_is_one_sentence(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        for text in ("", " \n", "half \ud83d"):
            with pytest.raises(InvalidRequest, match="The text to freeze"):
                engine.freeze(text)
        with pytest.raises(ContextOverflow, match="512"):
            engine.freeze("word " * 600)
        engine._frozen.store._write = _full_disk
        with pytest.raises(StorageFailed, match="No space left"):
            engine.freeze(TEXT)
        assert engine.frozen() == [] and not (tmp_path / "snapshots").exists()
    with engine_over(tmp_path, block_size=256) as engine, pytest.raises(InvalidRequest, match="too short"):
        engine.freeze("Hi")


def _full_disk(path: Path, data: bytes) -> None:
    raise OSError(28, "No space left on device", str(path))


@pytest.mark.parametrize("kind", ["mamba2", "bamba"])
def test_a_recurrent_state_can_not_be_frozen(tmp_path: Path, kind: str) -> None:
    with engine_over(tmp_path, kind=kind) as engine, pytest.raises(InvalidRequest, match="recurrent state"):
        engine.freeze(TEXT)


def test_a_prefix_that_would_be_stale_tomorrow_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="date"):
        prefix_ids(chat_tokenizer(LLAMA3), TEXT)


@pytest.mark.parametrize("make", [byte_level, merged_byte_level])
@pytest.mark.parametrize("template", [CHATML, "llama-3", "llama-2", "mistral", "zephyr", "plain"])
@pytest.mark.parametrize("message", ["Hi", " \n x", "\n\n", "日本", "aa"])
def test_the_ids_are_a_true_prefix_of_every_first_prompt(make: Any, template: str, message: str) -> None:
    named = template != CHATML
    tokenizer = ChatTokenizer(make(template=None if named else template), template if named else None)
    ids = prefix_ids(tokenizer, TEXT)
    messages = (ChatMessage("system", TEXT), ChatMessage("user", message))
    assert tokenizer.render(messages, DAY).token_ids[: len(ids)] == ids
    assert TEXT in tokenizer.decode(ids), "all of the text is in it"


def test_a_chat_of_the_page_begins_with_it(tmp_path: Path) -> None:
    options = {"data_dir": tmp_path, "snapshot_limit": 1 << 26}
    with tiny_chat(tmp_path, **options) as chat:
        entry = chat.engine.freeze(TEXT, "My Document!")
        assert entry["name"].startswith("my-document-")
    with tiny_chat(tmp_path, **options) as chat:
        session = chat.store.create(system_prompt=TEXT).id
        turn = chat.service.send(session, "Who are you?", GREEDY)
        turn.wait(2**62, timeout_s=60)
        assert turn.view().stats.reused_tokens == entry["tokens"]
        chat._engine_options["data_dir"] = tmp_path / "elsewhere"
        chat.assert_parity(turn)
        chat.assert_cache_is_history(turn)
        chat.service.delete_session(session)
        assert chat.engine.frozen() == [entry]
