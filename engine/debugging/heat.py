"""An audit as a picture: the largest error of each layer in each stretch of positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.debugging.faults import Layer

COLUMNS = 64


def heat_map(layers: Sequence[Layer], checked: Tensor) -> dict[str, Any]:
    """`{columns: [[first, last], ...], values: [[...], ...]}`: a row per layer, a column per stretch of positions.

    A value is the largest error there as a share of what is tolerated: above 1 is a fault, None is not finite.
    """
    positions = checked.nonzero().flatten()
    if not layers or not len(positions):
        return {"columns": [], "values": []}
    parts = positions.tensor_split(min(COLUMNS, len(positions)))
    values = []
    for layer in layers:
        shares = (layer.errors / layer.limits).amax(0)
        values.append([_shown(float(shares[part].max())) for part in parts])
    return {"columns": [[int(part[0]), int(part[-1])] for part in parts], "values": values}


def _shown(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
