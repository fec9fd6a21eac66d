"""What is asked of a row of logits at every token."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def all_finite(row: Tensor) -> bool:
    """Of float32 of any shape."""
    return bool(torch.isfinite(row).all())


def measures(row: Tensor, chosen: int) -> tuple[float, int, float, float]:
    """Of finite float32 [V] on the host, under the model itself: log probability of `chosen`, how many are likelier,
    entropy, largest probability.

    Entropy = log sum exp(x) - sum p x, with the maximum at 0.
    """
    values = row.numpy()
    shifted = values - values.max()
    weights = torch.exp(torch.from_numpy(shifted)).numpy()  # torch's is twice as fast
    total = float(weights.sum())
    log_total, mine = math.log(total), shifted[chosen]
    entropy = max(log_total - float(weights @ shifted) / total, 0.0)
    return float(mine) - log_total, int(np.count_nonzero(shifted > mine)), entropy, 1.0 / total
