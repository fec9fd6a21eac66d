"""Tensors out of a folder with safetensors files and a config.json."""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelFileError
from engine.weights.mapping import release_pages
from engine.weights.names import from_safetensors

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class _Entry:
    data: mmap.mmap
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsSource:
    """A model folder as a `WeightSource`; its files stay mapped. Raises `ModelFileError` for a damaged one."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = _read_json(path / "config.json")
        self._entries: dict[str, _Entry] = {}
        for file in _weight_files(path):
            self._add_file(file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def load(self, name: str) -> Tensor:
        tensor = self._view(name)
        return tensor.float() if tensor.dtype is torch.float64 else tensor

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return self._view(name)[ids].float()

    def block_format(self, name: str) -> str | None:
        return None

    def blocks(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        raise ModelFileError(f"The model's tensor {name} is not quantised in blocks.")

    def release(self) -> None:
        for data in {id(entry.data): entry.data for entry in self._entries.values()}.values():
            release_pages(data)

    def same(self, first: str, second: str) -> bool:
        return torch.equal(self._view(first), self._view(second))

    def _view(self, name: str) -> Tensor:
        entry = self._entries[name]
        count = math.prod(entry.shape)
        return torch.frombuffer(entry.data, dtype=entry.dtype, count=count, offset=entry.offset).view(entry.shape)

    def _add_file(self, file: Path) -> None:
        try:
            with file.open("rb") as stream:
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            length = int.from_bytes(data[:8], "little")
            if length > min(len(data) - 8, _MAX_HEADER):
                raise ValueError("header past the end")
            header = json.loads(data[8 : 8 + length])
            for name, info in header.items():
                canonical = from_safetensors(name, self.metadata.get("model_type"))
                if canonical is not None:
                    self._entries[canonical] = _entry(file, name, info, data, 8 + length)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFileError(f"The file {file.name} is damaged or cut short: its header can't be read.") from error


def _entry(file: Path, name: str, info: dict[str, Any], data: mmap.mmap, base: int) -> _Entry:
    if info["dtype"] not in _DTYPES:
        raise ModelFileError(f"Weights of safetensors type {info['dtype']} are not supported.")
    start, end = (int(offset) for offset in info["data_offsets"])
    dtype, shape = _DTYPES[info["dtype"]], tuple(int(length) for length in info["shape"])
    if base + end > len(data) or end - start != math.prod(shape) * dtype.itemsize:
        raise ModelFileError(f"The file {file.name} is cut short: the tensor {name} lies past its end.")
    return _Entry(data, dtype, shape, base + start)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"The model's {path.name} can't be read.") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"The model's {path.name} can't be read.")
    return content


def _weight_files(path: Path) -> list[Path]:
    """The files that the index names, or else all there are."""
    if (path / _INDEX).is_file():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelFileError(f"The model's {_INDEX} can't be read.")
        files = [path / Path(str(name)).name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelFileError(f"The model lacks the file {missing[0]}, which its index names.")
    if not files:
        raise ModelFileError("The model's folder holds no .safetensors file.")
    return files
