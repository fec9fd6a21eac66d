"""Mamba-2's recurrence and convolution: kernels against their definitions, those against transformers and float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from kernels.gpu.causal_conv import causal_conv, launch_causal_conv
from kernels.gpu.ssm_chunk import launch_ssm_chunk, ssm_chunk
from kernels.gpu.ssm_step import launch_ssm_step, ssm_step
from kernels.reference.ssm import causal_conv_reference, ssm_chunk_reference, ssm_step_reference
from tests.support import interpreter

DEVICE = "cpu" if interpreter.is_interpreting() else "cuda"
LIMITS = (0.0, float("inf"))


class _Problem:
    """Random inputs of `tokens` tokens; x, B and C are parts of one wide row, as a convolution leaves them."""

    def __init__(self, tokens: int, sequences: int, dtype: torch.dtype, P: int = 24, N: int = 20) -> None:
        generator = torch.Generator().manual_seed(tokens)
        heads, groups = 4, 2

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        row = random(tokens, heads * P + 2 * groups * N).to(dtype)
        x, B, C = row.split([heads * P, groups * N, groups * N], dim=1)
        self.x, self.B, self.C = x.view(tokens, heads, P), B.view(tokens, groups, N), C.view(tokens, groups, N)
        self.dt = random(tokens, heads).to(dtype) * 4 - 3  # from softplus's flat part to its linear one
        self.A, self.D, self.dt_bias = -random(heads).exp(), random(heads), random(heads)
        self.state = random(sequences, heads, P, N)

    def weights(self, limits: tuple[float, float] = LIMITS) -> tuple:
        return self.x, self.dt, self.A, self.B, self.C, self.D, self.dt_bias, *limits

    def exact(self, query_starts: list[int], limits: tuple[float, float] = LIMITS) -> tuple[Tensor, Tensor]:
        """(out, state) in float64, each head's state written out as a sum over all tokens before."""
        state, out = self.state.double(), torch.empty(self.x.shape, dtype=torch.float64, device=DEVICE)
        dt = F.softplus(self.dt.double() + self.dt_bias.double()).clamp(*limits)
        B, C = (t.double().repeat_interleave(2, dim=1) for t in (self.B, self.C))
        for i, (start, end) in enumerate(pairwise(query_starts)):
            first = state[i].clone()
            for t in range(start, end):
                passed = (dt[start : t + 1] * self.A.double()).flip(0).cumsum(0).flip(0)
                after = F.pad(passed[1:], (0, 0, 0, 1)).exp() * dt[start : t + 1]
                state[i] = passed[0].exp()[:, None, None] * first
                state[i] += torch.einsum("sh,shp,shn->hpn", after, self.x[start : t + 1].double(), B[start : t + 1])
                out[t] = torch.einsum("hpn,hn->hp", state[i], C[t]) + self.D.double()[:, None] * self.x[t].double()
        return out, state


def _assert_as_good(found: Tensor, reference: Tensor, exact: Tensor) -> None:
    """At most twice the error that torch makes in the same dtype."""
    allowed = 2 * (reference.double() - exact).abs().max().item() + 1e-6 * exact.abs().max().item()
    assert (found.double() - exact).abs().max().item() <= allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("limits", [LIMITS, (0.01, 0.5)])
def test_step(dtype: torch.dtype, limits: tuple[float, float]) -> None:
    problem = _Problem(2, 2, dtype)
    exact, exact_state = problem.exact([0, 1, 2], limits)
    results = []
    for run in (ssm_step_reference, ssm_step):
        state, out = problem.state.clone(), torch.full_like(problem.x, torch.nan)
        run(state, *problem.weights(limits), out)
        results.append((state, out))
    torch.testing.assert_close(results[0][0].double(), exact_state, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0][1].double(), exact, atol=1e-4, rtol=2e-3)
    _assert_as_good(results[1][0], results[0][0], exact_state)
    _assert_as_good(results[1][1], results[0][1], exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_chunks_of_different_length_go_on_from_their_state(dtype: torch.dtype) -> None:
    """Three sequences, one without tokens: its state stays as it is."""
    problem = _Problem(13, 3, dtype)
    starts = [0, 9, 9, 13]
    exact, exact_state = problem.exact(starts)
    results = []
    for run in (ssm_chunk_reference, ssm_chunk):
        state, out = problem.state.clone(), torch.full_like(problem.x, torch.nan)
        run(state, torch.tensor(starts, dtype=torch.int32, device=DEVICE), *problem.weights(), out)
        results.append((state, out))
    torch.testing.assert_close(results[0][0].double(), exact_state, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0][1].double(), exact, atol=1e-4, rtol=2e-3)
    _assert_as_good(results[1][0], results[0][0], exact_state)
    _assert_as_good(results[1][1], results[0][1], exact)
    assert torch.equal(results[1][0][1], problem.state[1])


def test_a_tiny_time_step_keeps_its_precision() -> None:
    """softplus(-20) is 2e-9: 1 + e rounds to 1, and its logarithm would be 0."""
    problem = _Problem(1, 1, torch.float32)
    problem.dt.fill_(-20.0)
    problem.dt_bias.zero_()
    problem.state.zero_()
    out = torch.empty_like(problem.x)
    ssm_step(problem.state, *problem.weights(), out)
    expected = 2.0611536e-9 * problem.x[0, 0, :, None] * problem.B[0, 0]
    torch.testing.assert_close(problem.state[0, 0], expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("with_bias", [True, False])
def test_convolution(with_bias: bool) -> None:
    """Sequences of 1, 0, 2 and 20 tokens: shorter than the state, and longer than a tile."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.tensor([0, 1, 1, 3, 23], dtype=torch.int32, device=DEVICE)
    state, x = (torch.randn(*shape, generator=generator).half().to(DEVICE) for shape in ((4, 150, 3), (23, 150)))
    weight, bias = (torch.randn(*shape, generator=generator).half().to(DEVICE) for shape in ((150, 4), (150,)))
    results = []
    for run in (causal_conv_reference, causal_conv):
        kept, out = state.clone(), torch.full_like(x, torch.nan)
        run(kept, starts, x, weight, bias if with_bias else None, out)
        results.append((kept, out))
    inputs = torch.cat((state[3], x[3:].T), dim=1)
    exact = F.conv1d(inputs[None].double(), weight[:, None].double(), bias.double() if with_bias else None, groups=150)
    exact = F.silu(exact)[0].T
    torch.testing.assert_close(results[0][1][3:].double(), exact, atol=1e-3, rtol=1e-3)
    _assert_as_good(results[1][1][3:], results[0][1][3:], exact)
    torch.testing.assert_close(results[1][1], results[0][1], atol=2e-3, rtol=2e-3)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[1][0][2], torch.cat((state[2], x[1:3].T), dim=1)[:, -3:])


@pytest.mark.parametrize("kernels", [False, True])
def test_mixer_of_transformers(kernels: bool) -> None:
    """A whole Mamba-2 mixer: 9 tokens of a prompt, then 2 decoded ones, are its forward over all 11."""
    conv, chunk, step = causal_conv_reference, ssm_chunk_reference, ssm_step_reference
    if kernels:
        conv, chunk, step = causal_conv, ssm_chunk, ssm_step
    config = Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, state_size=16, n_groups=2, expand=2, chunk_size=4, num_hidden_layers=1
    )
    torch.manual_seed(0)
    mixer = Mamba2Mixer(config, layer_idx=0).to(DEVICE).eval()
    hidden = torch.randn(1, 11, 32, device=DEVICE)
    state, conv_state = torch.zeros(1, 4, 16, 16, device=DEVICE), torch.zeros(1, mixer.conv_dim, 3, device=DEVICE)

    def forward(tokens: Tensor) -> Tensor:
        count = tokens.shape[0]
        gate, row, dt = mixer.in_proj(tokens).split([64, mixer.conv_dim, 4], dim=-1)
        starts = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        mixed = torch.empty(count, mixer.conv_dim, device=DEVICE)
        conv(conv_state, starts, row, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixed)
        x, B, C = mixed.split([64, 32, 32], dim=-1)
        parts = x.view(count, 4, 16), dt, -mixer.A_log.exp(), B.view(count, 2, 16), C.view(count, 2, 16)
        out = torch.empty(count, 4, 16, device=DEVICE)
        if count == 1:
            step(state, *parts, mixer.D, mixer.dt_bias, *config.time_step_limit, out)
        else:
            chunk(state, starts, *parts, mixer.D, mixer.dt_bias, *config.time_step_limit, out)
        return mixer.out_proj(mixer.norm(out.view(1, count, 64), gate[None]))[0]

    with torch.no_grad():
        expected = mixer(hidden)[0]
        found = torch.cat([forward(part) for part in hidden[0].split([9, 1, 1])])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_other_shapes_are_refused() -> None:
    problem = _Problem(2, 2, torch.float32)
    out = torch.empty_like(problem.x)
    with pytest.raises(ValueError, match="state must be contiguous float32"):
        launch_ssm_step(problem.state.half(), *problem.weights(), out)
    with pytest.raises(ValueError, match="out must be"):
        launch_ssm_step(problem.state, *problem.weights(), out[:1])
    with pytest.raises(ValueError, match="query_starts must be"):
        launch_ssm_chunk(problem.state, torch.tensor([0, 2]), *problem.weights(), out)
    with pytest.raises(ValueError, match=r"state must be \[S"):
        launch_causal_conv(torch.zeros(1, 4, 2), torch.zeros(2).int(), out[0], torch.zeros(4, 4), None, out[0])
