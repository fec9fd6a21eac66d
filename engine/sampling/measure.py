"""How sure the model was of a token: four numbers of a row of logits, in a few passes over it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from engine.protocol import TokenMeasure


def measure(logits: Tensor, token_id: int) -> TokenMeasure:
    """Of finite float32 [V] on the host, under the model itself.

    Entropy = log sum exp(x) - sum p x, with the maximum at 0.
    """
    values = logits.numpy()
    shifted = values - values.max()
    weights = torch.exp(torch.from_numpy(shifted)).numpy()  # torch's is twice as fast
    total = float(weights.sum())
    log_total = math.log(total)
    mine = shifted[token_id]
    return TokenMeasure(
        logprob=float(mine) - log_total,
        rank=int(np.count_nonzero(shifted > mine)),
        entropy=max(log_total - float(weights @ shifted) / total, 0.0),
        top1=1.0 / total,
    )
