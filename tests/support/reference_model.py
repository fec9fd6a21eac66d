"""A model and its tokenizer as transformers loads them: what ours are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def load_reference(file: Path) -> PreTrainedModel:
    """A GGUF file in float32."""
    with _quick_reading():
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def load_reference_tokenizer(file: Path) -> Any:
    """The tokenizer that a GGUF file holds."""
    with _quick_reading():
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@contextmanager
def _quick_reading() -> Iterator[None]:
    """transformers parses the header twice, each of its 150,000 fields as a memory map, and builds the same table of
    names once for each module, half a minute in all; here these are remembered, and the file is an array."""
    with (
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        patch.object(np, "memmap", lambda path, mode="r", dtype=np.uint8: np.fromfile(path, dtype)),
    ):
        yield
