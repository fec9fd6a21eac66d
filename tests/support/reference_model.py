"""A model as transformers loads it: what ours are compared with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest.mock import patch

import gguf
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_reference(file: Path) -> PreTrainedModel:
    """A GGUF file in float32.

    transformers parses the header twice and builds the same table of names once for each module, half a minute in all;
    here each of these is remembered.
    """
    with (
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
