"""`--freeze FILE` as a person types it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.local import LocalEngine
from tests.contract.test_command_line import assert_refused
from tests.support.tiny_models import save_safetensors, tiny_model
from tests.support.tiny_tokenizer import CHATML, byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_safetensors(tiny_model("llama", vocab_size=271, max_position_embeddings=256), folder)
    byte_level(template=CHATML).save_pretrained(folder)
    return folder


def test_freezes_and_ends_and_a_start_knows_it(tmp_path: Path, folder: Path, run_here) -> None:
    file = tmp_path / "My Rules.txt"
    file.write_bytes("\ufeffBe brief.\r\nAnswer in 世界.\n".encode())
    arguments = ("--model", folder, "--dtype", "float32")
    done = run_here("--freeze", file, *arguments)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    match = re.fullmatch(r"Frozen (my-rules-[0-9a-f]{8}): (\d+) tokens, [\d.]+ [KM]iB, \d+\.\d\d s", line)
    assert match, line
    engine = LocalEngine(EngineConfig(tmp_path / "data", str(folder), dtype="float32", snapshot_limit=0))
    engine.start()
    engine.wait_ready(60)
    [entry] = engine.frozen()
    engine.close()
    assert (entry["name"], entry["tokens"], entry["refused"]) == (match[1], int(match[2]), None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["can't be read", "No such file"]),
        (b"\xff\xfe\x00", ["not text in UTF-8"]),
        (b"", ["empty"]),
        (b" \n\t\n", ["empty"]),
        (b"x" * (8 << 20) + b"y", ["too long", "8 MiB"]),
        (b"far too long. " * 100, ["tokens", "256"]),
    ],
    ids=["no file", "not utf-8", "empty", "blank", "huge", "longer than the context"],
)
def test_bad_files(tmp_path: Path, folder: Path, content: bytes | None, words: list[str], run_here) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    assert_refused(run_here("--freeze", file, "--model", folder, "--dtype", "float32"), *words)
    assert not (tmp_path / "data" / "frozen").exists()


def test_a_folder_and_no_model(tmp_path: Path, run_here) -> None:
    assert_refused(run_here("--freeze", tmp_path), "can't be read")
    (tmp_path / "text.txt").write_text("Be brief.")
    assert_refused(run_here("--freeze", tmp_path / "text.txt", "--model", "no-such-model"), "no-such-model")
