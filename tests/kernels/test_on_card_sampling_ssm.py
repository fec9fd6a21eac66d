"""Sampling over real vocabularies and Mamba-2 at the shape of its 2.7B model; tiny where there is no card."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gpu.causal_conv import causal_conv
from kernels.gpu.sample import sample, scratch_width
from kernels.gpu.ssm_chunk import ssm_chunk
from kernels.gpu.ssm_step import ssm_step
from kernels.reference.sampling import SETTINGS, sample_reference
from kernels.reference.ssm import causal_conv_reference, ssm_chunk_reference, ssm_step_reference
from tests.support.sizes import DEVICE, assert_as_good, dtypes, normal, sized

REQUESTS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 2.0, "top_p": 0.6, "repetition_penalty": 1.3, "frequency_penalty": -0.5},
    {"temperature": 1.5, "top_p": 0.0},
    {"temperature": 1.0, "min_p": 0.3},
)
HEADS, CHANNELS, STATE, GROUPS = 80, 64, 128, 1
"""Of Mamba-2 2.7B: 80 heads of 64 channels, states of 128, B and C shared by all heads."""


@pytest.mark.parametrize("vocab", sized(300, {"llama-3": 128256, "qwen2.5": 152064}))
def test_draws_are_the_definitions(vocab: int) -> None:
    rows, results = len(REQUESTS), []
    neutral = {"top_p": 1.0, "repetition_penalty": 1.0}
    table = [
        {**neutral, "uniform": (row + 0.37) / rows, "biased": row % 2, "state_row": row, **request}
        for row, request in enumerate(REQUESTS)
    ]
    settings = torch.tensor(
        [[row.get(name, 0.0) for name in SETTINGS] for row in table], dtype=torch.float64, device=DEVICE
    )
    logits = 3 * normal(rows, vocab, dtype=torch.float32)
    for op in (sample, sample_reference):
        seen = torch.zeros(rows, vocab, dtype=torch.bool, device=DEVICE)
        seen[:, ::7] = True
        counts = (seen * 2).int()
        bias = normal(rows, vocab, dtype=torch.float32, seed=2)
        scratch = torch.full((rows, scratch_width(vocab)), -7, dtype=torch.int64, device=DEVICE)
        out = torch.full((rows,), -1, device=DEVICE)
        op(logits.clone(), settings, seen, counts, bias, scratch, out, False)
        results.append((out, seen, counts))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


class Mixer:
    """Random inputs of `tokens` tokens over `sequences` states."""

    def __init__(self, tokens: int, sequences: int, heads: int, dtype: torch.dtype) -> None:
        self.x = normal(tokens, heads, CHANNELS, dtype=dtype, seed=1)
        self.b, self.c = (normal(tokens, GROUPS, STATE, dtype=dtype, seed=seed) for seed in (2, 3))
        self.dt = 2 * normal(tokens, heads, dtype=dtype, seed=4) - 3
        self.a = -normal(heads, dtype=torch.float32, seed=5).exp()
        self.d, self.bias = (normal(heads, dtype=torch.float32, seed=seed) for seed in (6, 7))
        self.state = normal(sequences, heads, CHANNELS, STATE, dtype=torch.float32, seed=8)

    def arguments(self) -> tuple[object, ...]:
        return self.x, self.dt, self.a, self.b, self.c, self.d, self.bias, 0.0, float("inf")

    def exact(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        """(out, state) in float64, token by token."""
        state, out = self.state.double(), torch.empty(self.x.shape, dtype=torch.float64, device=DEVICE)
        for row, (first, last) in enumerate(pairwise(starts)):
            for t in range(first, last):
                dt = F.softplus(self.dt[t].double() + self.bias.double())
                grown = (dt[:, None] * self.x[t].double())[..., None] * self.b[t].double()
                state[row] = state[row] * (dt * self.a.double()).exp()[:, None, None] + grown
                out[t] = (state[row] * self.c[t].double()).sum(-1) + self.d.double()[:, None] * self.x[t].double()
        return out, state


@pytest.mark.parametrize("heads", sized(2, {"mamba2-2.7b": HEADS}))
def test_one_token_of_the_recurrence(heads: int) -> None:
    for dtype in dtypes():
        mixer = Mixer(3, 3, heads, dtype)
        results = []
        for op in (ssm_step, ssm_step_reference):
            state, out = mixer.state.clone(), torch.full_like(mixer.x, torch.nan)
            op(state, *mixer.arguments(), out)
            results.append((out, state))
        for got, same, exact in zip(*results, mixer.exact([0, 1, 2, 3]), strict=True):
            assert_as_good(got, same, exact)


@pytest.mark.parametrize("size", sized((2, [0, 9, 9, 13]), {"mamba2-2.7b": (HEADS, [0, 500, 500, 512])}))
def test_many_tokens_of_the_recurrence(size: tuple[int, list[int]]) -> None:
    heads, starts = size
    for dtype in dtypes():
        mixer, results = Mixer(starts[-1], len(starts) - 1, heads, dtype), []
        bounds = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        for op in (ssm_chunk, ssm_chunk_reference):
            state, out = mixer.state.clone(), torch.full_like(mixer.x, torch.nan)
            op(state, bounds, *mixer.arguments(), out)
            results.append((out, state))
        for got, same, exact in zip(*results, mixer.exact(starts), strict=True):
            assert_as_good(got, same, exact)


@pytest.mark.parametrize(
    "size", sized((150, [0, 1, 1, 13]), {"mamba2-2.7b": (HEADS * CHANNELS + 2 * STATE, [0, 1, 1, 1500])})
)
def test_convolution(size: tuple[int, list[int]]) -> None:
    channels, starts = size
    for dtype in dtypes():
        x, weight = normal(starts[-1], channels, dtype=dtype, seed=1), normal(channels, 4, dtype=dtype, seed=2)
        bias, kept = normal(channels, dtype=dtype, seed=3), normal(3, channels, 3, dtype=dtype, seed=4)
        bounds, results = torch.tensor(starts, dtype=torch.int32, device=DEVICE), []
        for op in (causal_conv, causal_conv_reference):
            state, out = kept.clone(), torch.full_like(x, torch.nan)
            op(state, bounds, x, weight, bias, out)
            results.append((out, state))
        inputs = torch.cat((kept[2], x[1:].T), 1)[None].double()
        exact = F.silu(F.conv1d(inputs, weight[:, None].double(), bias.double(), groups=channels))[0].T
        assert_as_good(results[0][0][1:], results[1][0][1:], exact)
        assert_as_good(results[0][0][:1], results[1][0][:1], results[1][0][:1])
        assert torch.equal(results[0][1], results[1][1])
