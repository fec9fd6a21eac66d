"""What a model file gives, whichever container it is: tensors by canonical name, read when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
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

    def block_format(self, name: str) -> str | None:
        """The GGUF type of a matrix that is quantised, whose rows `blocks` gives; None for any other."""
        ...

    def blocks(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [rows, bytes of a row]: a quantised matrix as it lies in the file, heads in order."""
        ...

    def release(self) -> None:
        """Let go of the memory that holds what was read of the file; it is read again when needed."""
        ...

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same values in the same type."""
        ...
