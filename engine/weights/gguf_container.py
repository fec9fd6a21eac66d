"""The GGUF container: header, key-value pairs, where each tensor lies. Types and sizes come from the `gguf` package.

Its own `GGUFReader` makes several array views for each string of the vocabulary, which takes seconds; walking the
bytes takes a few hundredths.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.errors import ModelFileError

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_LENGTH = struct.Struct("<Q")
_MAX_ENTRIES = 1 << 24


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in the file: `shape` outermost dimension first, `offset` and `nbytes` of its data from the start."""

    shape: tuple[int, ...]
    quant_type: GGMLQuantizationType
    offset: int
    nbytes: int


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self.data, self.position)
        start = self.position + _LENGTH.size
        self.position = start + length
        if self.position > len(self.data):
            raise struct.error("a string ends past the file")
        return self.data[start : self.position].decode("utf-8", "replace")

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.take(_SCALARS[kind])[0]
        item, count = self.take("IQ")
        item = GGUFValueType(item)
        if count > _MAX_ENTRIES:
            raise struct.error("an array is too long")
        if item in _SCALARS:
            return list(self.take(f"{count}{_SCALARS[item]}"))
        if item is GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        return [self.value(item) for _ in range(count)]


def read_container(path: Path) -> tuple[mmap.mmap, dict[str, Any], dict[str, TensorInfo]]:
    """`(mapped file, key-value pairs, tensors by their name in the file)`. Raises `ModelFileError`."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"The file {path.name} can't be read.") from error
    if data[:4] != b"GGUF":
        raise ModelFileError(f"The file {path.name} is not a GGUF model.")
    try:
        metadata, tensors = _parse(data)
    except (struct.error, ValueError, KeyError, OverflowError) as error:
        raise ModelFileError(f"The file {path.name} is damaged or cut short: its header can't be read.") from error
    for name, info in tensors.items():
        if info.offset + info.nbytes > len(data):
            raise ModelFileError(f"The file {path.name} is cut short: the tensor {name} lies past its end.")
    return data, metadata, tensors


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    cursor = _Cursor(data)
    _, version, tensor_count, pair_count = cursor.take("IIQQ")
    if version not in (2, 3) or max(tensor_count, pair_count) > _MAX_ENTRIES:
        raise ValueError("unknown version")
    metadata = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.take("I")[0]))
    found: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]] = []
    for _ in range(tensor_count):
        name = cursor.string()
        (dimensions,) = cursor.take("I")
        shape = cursor.take(f"{dimensions}Q")[::-1]
        kind, offset = cursor.take("IQ")
        found.append((name, shape, GGMLQuantizationType(kind), offset))
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, quant_type, offset in found:
        block, size = GGML_QUANT_SIZES[quant_type]
        elements = 1
        for length in shape:
            elements *= length
        tensors[name] = TensorInfo(shape, quant_type, start + offset, elements // block * size)
    return metadata, tensors
