"""The draw of the next token in plain torch, with the signature of its kernel."""

from __future__ import annotations

import torch
from torch import Tensor

SETTINGS = (
    "uniform",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Columns of `settings`, float64 [B, 8], so that a step's settings are one copy to the card. Meanings and neutral
values as in `engine.sampling.SamplingParams`; `uniform` in [0, 1) is the row's random number; temperature 0 is
greedy."""

_LOWEST_TEMPERATURE = 1e-30


def sample_reference(
    logits: Tensor, settings: Tensor, seen: Tensor, counts: Tensor, adjusted: Tensor, scratch: Tensor, out: Tensor
) -> None:
    """out int64 [B]: one token per row of logits [B, V], counted into seen (bool) and counts (int32), both [B, V].

    Order: repetition penalty, presence and frequency penalties, temperature, top-k, top-p, min-p; each filter keeps all
    that tie with the last one kept. Drawn by the inverse of the cumulative probability in the order of ids. A greedy
    row takes the lowest id of the largest logit. The workspaces `adjusted` and `scratch` are not used here.
    """
    for row, values in enumerate(settings.tolist()):
        token = _draw(logits[row].float(), seen[row], counts[row], dict(zip(SETTINGS, values, strict=True)))
        seen[row, token] = True
        counts[row, token] += 1
        out[row] = token


def _draw(x: Tensor, seen: Tensor, counts: Tensor, s: dict[str, float]) -> Tensor:
    x = torch.where(seen, torch.where(x < 0, x * s["repetition_penalty"], x / s["repetition_penalty"]), x)
    x = x - s["presence_penalty"] * (counts > 0) - s["frequency_penalty"] * counts
    if s["temperature"] == 0:
        return (x == x.max()).int().argmax()
    top_k = int(s["top_k"])
    y = (x - x.max()) / max(s["temperature"], _LOWEST_TEMPERATURE)
    if 0 < top_k < x.numel():
        y = y.masked_fill(x < torch.topk(x, top_k).values[-1], -torch.inf)
    if s["top_p"] < 1:
        values = y.sort(descending=True).values
        reached = values.double().exp().cumsum(0)
        before = reached[:-1] < s["top_p"] * reached[-1]
        y = y.masked_fill(y < values[before.sum()], -torch.inf)
    y = y.masked_fill(y.exp() < s["min_p"], -torch.inf)
    cumulative = y.double().exp().cumsum(0)
    index = torch.searchsorted(cumulative, s["uniform"] * cumulative[-1], right=True)
    # The product may round up to the whole sum; then it is the last token that can be drawn.
    return torch.minimum(index, torch.searchsorted(cumulative, cumulative[-1]))
