"""The device's sampler draws what the CPU's does: the same settings and random number give the same token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler, SamplingState, uniform
from kernels.gpu.sample import launch_sample, sample, scratch_width
from kernels.reference.sampling import SETTINGS, sample_reference
from tests.support import interpreter

DEVICE = "cpu" if interpreter.is_interpreting() else "cuda"

REQUESTS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, top_p=1.0),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.3, top_k=7, top_p=1.0),
    SamplingParams(temperature=2.0, top_p=0.6, repetition_penalty=1.3, frequency_penalty=-0.5),
    SamplingParams(temperature=1.5, top_p=0.0),
    SamplingParams(temperature=1.0, top_p=1.0, min_p=0.3, presence_penalty=-1.0),
    SamplingParams(temperature=1e-4, top_k=3),
]


class _Rows:
    """The tensors of a batch, and the CPU's states of the same requests."""

    def __init__(self, requests: list[SamplingParams], vocab_size: int, prompt: list[int], reply: list[int]) -> None:
        rows = len(requests)
        self.requests, self.vocab_size, self.count = requests, vocab_size, len(reply)
        self.states = []
        for index, params in enumerate(requests):
            state = SamplingState(dataclasses.replace(params, seed=100 + index), prompt, vocab_size)
            for token_id in reply:
                state.accept(token_id)
            self.states.append(state)
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool)
        self.seen[:, prompt + reply] = True
        self.counts = torch.bincount(torch.tensor(reply, dtype=torch.int64), minlength=vocab_size).int()
        self.counts = self.counts.repeat(rows, 1)
        self.seen, self.counts = self.seen.to(DEVICE), self.counts.to(DEVICE)

    def settings(self) -> torch.Tensor:
        rows = []
        for index, params in enumerate(self.requests):
            values = {"uniform": uniform(100 + index, self.count), **dataclasses.asdict(params)}
            rows.append([float(values[name]) for name in SETTINGS])
        return torch.tensor(rows, dtype=torch.float64, device=DEVICE)

    def draw(self, logits: torch.Tensor, reference: bool = False) -> list[int]:
        rows = len(self.requests)
        out = torch.full((rows,), -1, device=DEVICE)
        adjusted = torch.full((rows, self.vocab_size), torch.nan, device=DEVICE)
        scratch = torch.full((rows, scratch_width(self.vocab_size)), -7, dtype=torch.int64, device=DEVICE)
        settings, run = self.settings(), sample_reference if reference else sample
        run(logits.to(DEVICE), settings, self.seen, self.counts, adjusted, scratch, out)
        self.count += 1
        return out.tolist()


def _logits(rows: int, vocab_size: int, seed: int, step: float = 0.0) -> torch.Tensor:
    """With `step`, rounded to multiples of it: many ties."""
    values = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return (values / step).round() * step if step else values


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(("vocab_size", "step"), [(300, 0.0), (300, 0.5), (9001, 0.0)])
def test_draws_are_those_of_the_cpu(vocab_size: int, step: float, reference: bool) -> None:
    requests = REQUESTS if vocab_size < 1000 else [REQUESTS[i] for i in (1, 3, 5)]
    rows = _Rows(requests, vocab_size, prompt=[3, 5, 5, 17], reply=[5, 5, 250])
    for turn in range(30 if reference else 2):
        logits = _logits(len(requests), vocab_size, seed=turn, step=step)
        expected = Sampler().sample(logits, rows.states).token_ids
        assert rows.draw(logits, reference) == expected


def test_ties_at_a_border_are_all_kept_and_the_lowest_id_is_greedy() -> None:
    """Four equal logits: top_k=2 and top_p=0.3 keep all four; a random number of 0.99 takes the last of them."""
    logits = torch.full((1, 8), -4.0)
    logits[0, [1, 3, 4, 6]] = 2.0
    settings = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    rows = [
        settings | {"uniform": 0.99, "top_k": 2},
        settings | {"uniform": 0.99, "top_p": 0.3},
        settings | {"uniform": 0.0, "top_k": 2},
        settings | {"temperature": 0.0},
    ]
    table = torch.tensor([[row.get(name, 0.0) for name in SETTINGS] for row in rows], dtype=torch.float64)
    seen, counts = torch.zeros(4, 8, dtype=torch.bool), torch.zeros(4, 8, dtype=torch.int32)
    workspace = torch.empty(4, 8), torch.empty(4, scratch_width(8), dtype=torch.int64)
    out = torch.empty(4, dtype=torch.int64)
    tensors = [t.to(DEVICE) for t in (logits.expand(4, 8).contiguous(), table, seen, counts, *workspace, out)]
    sample(*tensors)
    assert tensors[-1].tolist() == [6, 6, 1, 1]
    assert tensors[2].nonzero().tolist() == [[0, 6], [1, 6], [2, 1], [3, 1]]
    assert tensors[3].sum(1).tolist() == [1, 1, 1, 1]


def test_negative_zero_ties_with_zero() -> None:
    rows = _Rows([SamplingParams(temperature=0.0)], 4, [], [])
    assert rows.draw(torch.tensor([[-1.0, -0.0, 0.0, -2.0]])) == [1]


def test_frequencies_follow_the_probabilities() -> None:
    """The reference over a grid of random numbers: each token as often as softmax says."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = 1000
    settings = torch.zeros(rows, len(SETTINGS), dtype=torch.float64)
    settings[:, 0] = (torch.arange(rows) + 0.5) / rows
    settings[:, 1], settings[:, 3], settings[:, 5] = 1.0, 1.0, 1.0
    seen, counts = torch.zeros(rows, 4, dtype=torch.bool), torch.zeros(rows, 4, dtype=torch.int32)
    out = torch.empty(rows, dtype=torch.int64)
    sample_reference(logits.expand(rows, 4), settings, seen, counts, seen, seen, out)
    shares = np.bincount(out.numpy(), minlength=4) / rows
    np.testing.assert_allclose(shares, logits.softmax(0).numpy(), atol=2e-3)


def test_other_shapes_are_refused() -> None:
    tensors = [
        torch.zeros(1, 4),
        torch.zeros(1, 8, dtype=torch.float64),
        torch.zeros(1, 4, dtype=torch.bool),
        torch.zeros(1, 4, dtype=torch.int32),
        torch.zeros(1, 4),
        torch.zeros(1, scratch_width(4), dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    ]
    with pytest.raises(ValueError, match="settings must be"):
        launch_sample(tensors[0], tensors[1].float(), *tensors[2:])
    with pytest.raises(ValueError, match="scratch must be"):
        launch_sample(*tensors[:5], tensors[5][:, :3], tensors[6])
