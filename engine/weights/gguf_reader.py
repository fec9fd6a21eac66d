"""Tensors out of a GGUF file, dequantised when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor

from engine.errors import ModelFileError
from engine.weights.gguf_container import TensorInfo, read_container
from engine.weights.mapping import release_pages
from engine.weights.names import from_gguf

# The converter to GGUF interleaves each head's two rotary halves for these, and only these, of the ones we run.
_PERMUTED_ARCHITECTURES = ("llama",)
_PLAIN = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}


def decode_blocks(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: str) -> Tensor:
    """float32 [rows, columns] of quantised rows as they lie in a file; `kind` is the name of their GGUF type."""
    return torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]))


class GGUFSource:
    """A memory-mapped GGUF file as a `WeightSource`. Raises `ModelFileError` for what is none or is damaged."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data, self.metadata, tensors = read_container(path)
        self._tensors: dict[str, TensorInfo] = {}
        for name, info in tensors.items():
            canonical = from_gguf(name)
            if canonical is not None:
                self._tensors[canonical] = info
        self._heads = self._head_counts()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self._tensors.items()}

    def load(self, name: str) -> Tensor:
        info = self._tensors[name]
        return self._decode(self._ordered(name), info, info.shape)

    def block_format(self, name: str) -> str | None:
        kind = self._tensors[name].quant_type
        return None if kind in _PLAIN or kind is GGMLQuantizationType.BF16 else kind.name

    def blocks(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._ordered(name)

    def release(self) -> None:
        release_pages(self._data)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        info = self._tensors[name]
        picked = self._raw(info)[ids.numpy()]
        return self._decode(picked, info, (len(ids), info.shape[1])).float()

    def same(self, first: str, second: str) -> bool:
        a, b = self._tensors[first], self._tensors[second]
        return (a.shape, a.quant_type) == (b.shape, b.quant_type) and np.array_equal(self._raw(a), self._raw(b))

    def _ordered(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Raw rows; each is quantised on its own, so those of interleaved heads can be put in order."""
        info = self._tensors[name]
        raw = self._raw(info)
        heads = self._heads.get(".".join(name.split(".")[2:]))
        if not heads:
            return raw
        raw = raw.reshape(heads, -1, 2, info.nbytes // info.shape[0])
        return np.ascontiguousarray(raw.swapaxes(1, 2)).reshape(info.shape[0], -1)

    def _raw(self, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [rows, bytes of a row], a view of the mapped file."""
        flat = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        return flat.reshape(info.shape[0] if len(info.shape) > 1 else 1, -1)

    def _decode(self, raw: np.ndarray[Any, np.dtype[np.uint8]], info: TensorInfo, shape: tuple[int, ...]) -> Tensor:
        if info.quant_type in _PLAIN:
            return torch.from_numpy(np.ascontiguousarray(raw)).view(_PLAIN[info.quant_type]).view(shape)
        if info.quant_type is GGMLQuantizationType.BF16:
            return torch.from_numpy(np.ascontiguousarray(raw)).view(torch.bfloat16).view(shape)
        try:
            return decode_blocks(raw, info.quant_type.name).view(shape)
        except NotImplementedError as error:
            raise ModelFileError(f"Weights of GGUF type {info.quant_type.name} are not supported.") from error

    def _head_counts(self) -> dict[str, int]:
        arch = self.metadata.get("general.architecture")
        if arch not in _PERMUTED_ARCHITECTURES:
            return {}
        heads = self.metadata.get(f"{arch}.attention.head_count")
        if not isinstance(heads, int):
            return {}
        kv_heads = int(self.metadata.get(f"{arch}.attention.head_count_kv") or heads)
        return {"q.weight": heads, "q.bias": heads, "k.weight": kv_heads, "k.bias": kv_heads}
