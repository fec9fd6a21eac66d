"""Mamba-2's recurrence and causal convolution in plain torch, with the signatures of their kernels.

Dao and Gu, "Transformers are SSMs" (2024): per head, with dt = softplus(dt + dt_bias) held in dt_min..dt_max,

    state = exp(dt A) state + dt x Bᵀ        y = state C + D x

H heads of P channels, state size N, B and C shared by the H / G heads of a group. Sums and states are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def ssm_step_reference(
    state: Tensor,
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
    """One token of S sequences. state float32 [S, H, P, N], updated; x, out [S, H, P]; dt [S, H]; B, C [S, G, N]; A
    (negative), D, dt_bias [H]."""
    groups = x.shape[1] // B.shape[1]
    step = F.softplus(dt.float() + dt_bias.float()).clamp(dt_min, dt_max)
    wide_b, wide_c = (t.float().repeat_interleave(groups, dim=1) for t in (B, C))
    state *= torch.exp(step * A.float())[..., None, None]
    state += (step[..., None] * x.float())[..., None] * wide_b[:, :, None]
    out.copy_((state * wide_c[:, :, None]).sum(-1) + D.float()[:, None] * x.float())


def ssm_chunk_reference(
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
    """As `ssm_step_reference` for T tokens of S sequences, those of sequence i from `query_starts[i]` (int32 [S + 1])
    to the next: x, out [T, H, P]; dt [T, H]; B, C [T, G, N]. `state` is where each sequence starts and then ends."""
    starts = query_starts.tolist()
    for i in range(len(starts) - 1):
        for t in range(starts[i], starts[i + 1]):
            token = slice(t, t + 1)
            ssm_step_reference(
                state[i : i + 1], x[token], dt[token], A, B[token], C[token], D, dt_bias, dt_min, dt_max, out[token]
            )


def causal_conv_reference(
    state: Tensor, query_starts: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out [T, channels] = silu(weight [channels, width] over each token and the width - 1 before it, + bias).

    Tokens of sequence i lie from `query_starts[i]` (int32 [S + 1]) to the next in x [T, channels]; `state` [S,
    channels, width - 1] holds the inputs that came before them and is left holding the last ones.
    """
    starts = query_starts.tolist()
    for i in range(len(starts) - 1):
        if starts[i] == starts[i + 1]:
            continue
        inputs = torch.cat((state[i], x[starts[i] : starts[i + 1]].T.to(state.dtype)), dim=1)
        wide = inputs.float().unfold(1, weight.shape[1], 1)
        total = (wide * weight.float()[:, None]).sum(-1)
        if bias is not None:
            total = total + bias.float()[:, None]
        out[starts[i] : starts[i + 1]] = F.silu(total).T.to(out.dtype)
        state[i] = inputs[:, inputs.shape[1] - state.shape[2] :]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """x, gate [T, n] -> x * silu(gate), each of the groups' n / groups channels normed by itself, * weight [n].

    Computed in float32, returned in x's dtype.
    """
    gated = (x.float() * F.silu(gate.float())).view(len(x), groups, -1)
    normed = F.rms_norm(gated, gated.shape[-1:], None, eps)
    return (normed.view(x.shape) * weight.float()).to(x.dtype)
