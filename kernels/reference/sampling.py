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
    "biased",
    "state_row",
)
"""Columns of `settings`, float64 [B, 10], so that a step's settings are one copy to the card. Meanings and neutral
values as in `engine.sampling.SamplingParams`; `uniform` in [0, 1) is the row's random number; temperature 0 is greedy;
`biased` is 1 where the row has a bias; `state_row` is its row of `seen`, `counts` and `bias`. Rows with neutral
penalties and no bias don't read theirs, so that any number of them may share one."""

NOT_FINITE = -1
"""Taken for the token of a row with a logit that is not finite."""

_LOWEST_TEMPERATURE = 1e-30


def sample_reference(
    logits: Tensor,
    settings: Tensor,
    seen: Tensor,
    counts: Tensor,
    bias: Tensor,
    scratch: Tensor,
    out: Tensor,
    greedy: bool,
) -> None:
    """out int64 [B]: one token per row of logits float32 [B, V], or `NOT_FINITE`.

    seen (bool), counts (int32) and bias (float32, -inf for banned tokens) are [S, V]; row `state_row` of the first two
    takes the token in. `greedy`: the caller knows that every row is. Logits of rows with penalties or bias may be
    overwritten. `scratch` is not used here.

    Order: repetition penalty, presence and frequency penalties, bias, temperature, top-k, top-p, min-p; each filter
    keeps all that tie with the last one kept. Drawn by the inverse of the cumulative probability in the order of ids. A
    greedy row takes the lowest id of the largest logit.
    """
    for row, values in enumerate(settings.tolist()):
        if not bool(torch.isfinite(logits[row]).all()):
            out[row] = NOT_FINITE
            continue
        asked = dict(zip(SETTINGS, values, strict=True))
        state = int(asked["state_row"])
        x = _adjust(logits[row], seen[state], counts[state], bias[state], asked)
        token = _draw(x, asked)
        seen[state, token] = True
        counts[state, token] += 1
        out[row] = token


def _adjust(x: Tensor, seen: Tensor, counts: Tensor, bias: Tensor, s: dict[str, float]) -> Tensor:
    penalised = torch.where(x < 0, x * s["repetition_penalty"], x / s["repetition_penalty"])
    x = torch.where(seen, penalised, x)
    x = x - s["presence_penalty"] * (counts > 0) - s["frequency_penalty"] * counts
    return x + bias if s["biased"] else x


def _draw(x: Tensor, s: dict[str, float]) -> Tensor:
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
