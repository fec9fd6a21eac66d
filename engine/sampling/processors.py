"""What changes logits between model and draw: pure functions on float32 logits [N, V] that return a new tensor.

They are applied in this order: repetition penalty, presence and frequency penalties, logit bias, hooks of the request,
temperature, top-k, top-p, min-p. A logit of -inf is a token that can't be drawn. Each filter looks at what the ones
before it left, keeps all tokens that tie with the last one kept, and never masks a whole row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BAN_BIAS, FORCE_BIAS = -100.0, 100.0
_LOWEST_TEMPERATURE = 1e-30  # below it float32 would divide by zero
_NUCLEUS_STEPS = (64, 1024, 8192)


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens of prompt and reply less likely (penalty > 1). `seen` bool [N, V] or [V]."""
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalised, logits)


def apply_count_penalties(logits: Tensor, counts: Tensor, presence: float, frequency: float) -> Tensor:
    """Take `presence` off tokens that are in the reply, and `frequency` for each time. `counts` int [N, V] or [V]."""
    return logits - presence * (counts > 0) - frequency * counts


def apply_logit_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a bias per token id. -100 or less bans a token, 100 or more leaves only such tokens: at any temperature."""
    forced = [token_id for token_id, value in bias.items() if value >= FORCE_BIAS]
    if forced:
        masked = torch.full_like(logits, -torch.inf)
        masked[..., forced] = logits[..., forced]
        logits = masked
    ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
    shifts = [value if value > BAN_BIAS else -torch.inf for value in bias.values()]
    values = torch.tensor(shifts, dtype=logits.dtype, device=logits.device)
    return logits.index_add(-1, ids, values.expand(*logits.shape[:-1], -1))


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide by `temperature` > 0. The row's maximum becomes 0 first, so that no quotient overflows."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, _LOWEST_TEMPERATURE)


def apply_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the `k` largest logits (k >= 1)."""
    if k >= logits.shape[-1]:
        return logits
    smallest = torch.topk(logits, k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < smallest, -torch.inf)


def apply_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities reach `top_p`; always at least one."""
    if top_p >= 1.0:
        return logits
    top = logits.amax(dim=-1, keepdim=True)
    total = torch.exp(logits - top).sum(dim=-1, keepdim=True, dtype=torch.float64)
    size = logits.shape[-1]
    for k in (*(step for step in _NUCLEUS_STEPS if step < size), size):
        largest = torch.topk(logits, k, dim=-1).values
        reached = torch.exp((largest - top).double()).cumsum(dim=-1) / total
        if k == size or bool((reached[..., -1] >= top_p).all()):
            break
    # A token is kept while the ones before it have not reached top_p; the first has none before it.
    kept = (reached[..., :-1] < top_p).sum(dim=-1, keepdim=True)
    return logits.masked_fill(logits < largest.gather(-1, kept), -torch.inf)


def apply_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep tokens at least `min_p` times as likely as the likeliest one."""
    if min_p <= 0.0:
        return logits
    shares = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    return logits.masked_fill(shares < min_p, -torch.inf)
