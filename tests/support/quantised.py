"""Valid GGUF blocks for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from kernels.planes import FORMATS

KINDS = tuple(FORMATS)
ENCODED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # what gguf can also write


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [rows, bytes of a row]: encoded normal weights where gguf can, else random bits with sane scales."""
    rng = np.random.default_rng([seed, rows, columns])
    if kind in ENCODED:
        weights = rng.normal(scale=0.05, size=(rows, columns)).astype(np.float32)
        return quantize(weights, GGMLQuantizationType[kind])
    fmt = FORMATS[kind]
    blocks = rng.integers(0, 256, (rows, columns // fmt.columns, fmt.nbytes), np.uint8)
    scales = rng.uniform(1e-4, 1e-3, (*blocks.shape[:2], 2 if fmt.has_min else 1)).astype(np.float16)
    blocks[..., fmt.scale_at : fmt.scale_at + 2 * scales.shape[-1]] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def gguf_values(blocks: np.ndarray[Any, np.dtype[np.uint8]], kind: str) -> Tensor:
    """float32 [rows, columns] as the gguf package decodes them."""
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))
