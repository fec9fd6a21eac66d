"""How sure the model was of a token."""

from __future__ import annotations

from torch import Tensor

from engine.debugging.protocol import TokenMeasure
from kernels.dispatch import row_measures


def measure(logits: Tensor, token_id: int) -> TokenMeasure:
    """Of finite float32 [V] on the host, under the model itself."""
    return TokenMeasure(*row_measures("cpu").measures(logits.contiguous(), token_id))
