"""Mamba-2's recurrence over many tokens as people run it on a CPU: the sums of `ssm`, by matrix products.

Within a block of tokens the recurrence is a masked product of C, B and x (the paper's dual form): token i takes
exp(sum of dt A over j + 1 .. i) of what token j put in, and exp(sum over 0 .. i) of the state before the block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Tokens of a block: the masked product grows with their square, the passes over the state shrink with their number."""


def ssm_chunk(
    state: Tensor,
    query_starts: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    out: Tensor,
) -> None:
    """As `kernels.reference.ssm.ssm_chunk_reference`, in blocks of at most `BLOCK` tokens."""
    step = F.softplus(dt.float() + dt_bias.float()).clamp(dt_min, dt_max)
    decay = step * A.float()
    starts = query_starts.tolist()
    for i in range(len(starts) - 1):
        for first in range(starts[i], starts[i + 1], BLOCK):
            span = slice(first, min(first + BLOCK, starts[i + 1]))
            values = x[span].float()
            found = _block(state[i], step[span], decay[span], values, B[span].float(), C[span].float())
            out[span] = found + D.float()[:, None] * values


def _block(state: Tensor, step: Tensor, decay: Tensor, x: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """state [H, P, N], moved on; step, decay (of the logarithm) [T, H], x [T, H, P], B, C [T, G, N] -> [T, H, P]."""
    tokens, heads, _ = x.shape
    groups = heads // B.shape[1]
    total = decay.double().cumsum(0).T
    # Differences of sums, never quotients of exponentials: those of a fast decay are 0 / 0. A difference keeps few
    # digits of float32 sums.
    passed = (total[:, :, None] - total[:, None, :]).float()
    passed.masked_fill_(_future(tokens, x.device), float("-inf")).exp_()
    since_start = total.float().exp()
    scores = torch.einsum("tgn,sgn->gts", C, B).repeat_interleave(groups, dim=0)
    inputs = (x * step[..., None]).transpose(0, 1)
    found = torch.bmm(scores.mul_(passed), inputs)
    wide_b, wide_c = (t.transpose(0, 1).repeat_interleave(groups, dim=0) for t in (B, C))
    found += torch.bmm(wide_c, state.transpose(1, 2)) * since_start[..., None]
    state *= since_start[:, -1, None, None]
    state += torch.bmm((inputs * passed[:, -1, :, None]).transpose(1, 2), wide_b)
    return found.transpose(0, 1)


def _future(tokens: int, device: torch.device) -> Tensor:
    """bool [tokens, tokens]: whether token s comes after token t."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu_(1)
