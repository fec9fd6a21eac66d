"""float32 to fp8 as a card does it: Triton's interpreter loses the carry of a mantissa that rounds up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def round_to_nearest(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, interpreted kernels convert float32 to e4m3 with torch's rounding."""
    stock = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.float8e4nv:
            return stock(data, source, target, mode)
        return torch.tensor(data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    patch.setattr(interpreter, "_convert_float", convert)
