"""The same weights elsewhere are the same, others never are, and a large file is not read in full."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.weights import identity
from engine.weights.identity import HEAD_BYTES, weights_identity
from tests.support.tiny_models import save_gguf, save_safetensors, tiny_model

MODELS = (("llama", 0), ("llama", 1), ("qwen2", 0))


@pytest.mark.parametrize("save", [save_gguf, save_safetensors])
def test_copies_are_equal_and_other_models_differ(tmp_path: Path, save) -> None:
    paths = [save(tiny_model(kind, seed), tmp_path / str(n)) for n, (kind, seed) in enumerate(MODELS)]
    ids = [weights_identity(path) for path in paths]
    assert len(set(ids)) == len(MODELS)
    moved = tmp_path / "elsewhere"
    (shutil.copytree if paths[0].is_dir() else shutil.copyfile)(paths[0], moved)
    assert weights_identity(moved) == ids[0]


def test_one_changed_config_value_is_another_model(tmp_path: Path) -> None:
    folder = save_safetensors(tiny_model("llama"), tmp_path / "model")
    before = weights_identity(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert weights_identity(folder) != before


def test_of_a_large_file_samples_are_read_from_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    size = HEAD_BYTES + 64 * 100_000
    path.write_bytes(bytes(size))
    before = weights_identity(path)
    for position in (0, HEAD_BYTES - 1, HEAD_BYTES + 17, HEAD_BYTES + 63 * 100_000 + 4095):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"\1")
        assert weights_identity(path) != before
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"\0")
    assert weights_identity(path) == before
    with path.open("ab") as file:
        file.write(b"\0")
    assert weights_identity(path) != before
    assert identity.SAMPLES * identity.SAMPLE_BYTES + HEAD_BYTES < 1.3 * 2**20
