"""What a model file gives, whichever container it is: tensors by canonical name, read when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Tensors of one model, memory-mapped. `metadata` is the content of config.json or the GGUF key-value pairs."""

    path: Path
    kind: str
    metadata: dict[str, object]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor that a decoder may use."""
        ...

    def load(self, name: str) -> Tensor:
        """The whole tensor: in the file's own type where that is float32, float16 or bfloat16, else float32."""
        ...

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """float32 [n, columns]: some rows of a matrix, read from the file without loading the rest."""
        ...

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same values in the same type."""
        ...
