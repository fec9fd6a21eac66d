"""The recurrence by matrix products against its definition, both measured by float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.recurrence import BLOCK, ssm_chunk
from kernels.reference.ssm import ssm_chunk_reference

HEADS, GROUPS, CHANNELS, SIZE = 4, 2, 12, 20
LENGTHS = (BLOCK + 1, 0, 1, 2 * BLOCK, 37)


def problem(rate: float) -> tuple[Tensor, Tensor, tuple]:
    """(state, query_starts, the other inputs). `rate` is how fast states decay: up to exp(-rate * 5) a token."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = sum(LENGTHS)
    row = random(tokens, HEADS * CHANNELS + 2 * GROUPS * SIZE)
    x, B, C = row.split([HEADS * CHANNELS, GROUPS * SIZE, GROUPS * SIZE], dim=1)
    groups = (tokens, GROUPS, SIZE)
    A = -rate * random(HEADS).abs()
    inputs = x.view(tokens, HEADS, CHANNELS), random(tokens, HEADS), A, B.view(groups), C.view(groups)
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return random(len(LENGTHS), HEADS, CHANNELS, SIZE), starts, (*inputs, random(HEADS), random(HEADS), 0.01, 2.0)


def exact(state: Tensor, starts: Tensor, inputs: tuple) -> tuple[Tensor, Tensor]:
    """(out, state), token by token in float64."""
    x, dt, A, B, C, D, dt_bias, low, high = (value.double() if isinstance(value, Tensor) else value for value in inputs)
    step = F.softplus(dt + dt_bias).clamp(low, high)
    B, C = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (B, C))
    state, out = state.double(), torch.empty_like(x)
    for i, (start, end) in enumerate(pairwise(starts.tolist())):
        for t in range(start, end):
            fed = torch.einsum("hp,hn->hpn", x[t] * step[t, :, None], B[t])
            state[i] = state[i] * torch.exp(step[t] * A)[:, None, None] + fed
            out[t] = torch.einsum("hpn,hn->hp", state[i], C[t]) + D[:, None] * x[t]
    return out, state


@pytest.mark.parametrize("rate", [0.02, 1.0, 60.0], ids=["slow", "usual", "vanishing"])
def test_products_are_as_good_as_the_definition(rate):
    """States that hardly fade, and such that are gone after a token, where exponentials underflow."""
    state, starts, inputs = problem(rate)
    wanted, wanted_state = exact(state, starts, inputs)
    errors = []
    for run in (ssm_chunk_reference, ssm_chunk):
        kept, out = state.clone(), torch.full_like(inputs[0], torch.nan)
        run(kept, starts, *inputs, out)
        errors.append(((out - wanted).abs().max().item(), (kept - wanted_state).abs().max().item()))
        assert torch.equal(kept[1], state[1]), "a sequence without tokens keeps its state"
    for found, reference, size in zip(errors[1], errors[0], (wanted, wanted_state), strict=True):
        assert found <= 2 * reference + 2e-6 * size.abs().max().item()


def test_half_precision_inputs_are_summed_in_float32():
    state, starts, (x, dt, A, B, C, *rest) = problem(1.0)
    halves = tuple(t.half() for t in (x, dt)), tuple(t.half() for t in (B, C))
    (x, dt), (B, C) = halves
    inputs = (x, dt, A, B, C, *rest)
    wanted, _ = exact(state, starts, inputs)
    out = torch.empty_like(x)
    ssm_chunk(state, starts, *inputs, out)
    assert (out - wanted).abs().max() <= torch.finfo(torch.float16).eps * wanted.abs().max()


def test_bad_values_stay_in_their_sequence_and_after_their_token():
    state, starts, inputs = problem(1.0)
    out, clean = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
    ssm_chunk(state.clone(), starts, *inputs, clean)
    inputs[0][starts[3] + 70, 1, 2] = torch.nan
    ssm_chunk(state, starts, *inputs, out)
    first, end = int(starts[3]) + BLOCK, int(starts[4])
    assert torch.equal(out[:first], clean[:first]) and torch.equal(out[end:], clean[end:])
    assert not torch.isfinite(out[int(starts[3]) + 70 :, 1, 2][: end - int(starts[3]) - 70]).any()
    assert not torch.isfinite(state[3, 1, 2]).any() and torch.isfinite(state[[0, 1, 2, 4]]).all()
