"""The device's sampler draws what the CPU's does: the same settings and random number give the same token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.sampling import processors
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler, SamplingState, uniform
from kernels.gpu.sample import launch_sample, sample, scratch_width
from kernels.reference.sampling import NOT_FINITE, SETTINGS, sample_reference
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
    SamplingParams(temperature=1.0, top_k=9, presence_penalty=0.5, logit_bias={5: 4.0, 17: -100.0, 2: 1.5}),
    SamplingParams(temperature=1.0, top_p=0.99, repetition_penalty=1.2, logit_bias={5: 100.0, 17: 101.0, 2: -1.0}),
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
        nothing = torch.zeros(vocab_size)
        self.bias = torch.stack([processors.apply_logit_bias(nothing, params.logit_bias) for params in requests])
        # The state of batch row i lies in row `order[i]`.
        self.order = [(index * 7 + 3) % rows for index in range(rows)] if rows % 7 else list(range(rows))
        back = [self.order.index(index) for index in range(rows)]
        self.seen, self.counts, self.bias = (t[back].to(DEVICE) for t in (self.seen, self.counts, self.bias))

    def settings(self) -> torch.Tensor:
        rows = []
        for index, params in enumerate(self.requests):
            values = {"uniform": uniform(100 + index, self.count), **dataclasses.asdict(params)}
            values |= {"biased": bool(params.logit_bias), "state_row": self.order[index]}
            rows.append([float(values[name]) for name in SETTINGS])
        return torch.tensor(rows, dtype=torch.float64, device=DEVICE)

    def draw(self, logits: torch.Tensor, reference: bool = False) -> list[int]:
        rows = len(self.requests)
        out = torch.full((rows,), -1, device=DEVICE)
        scratch = torch.full((rows, scratch_width(self.vocab_size)), -7, dtype=torch.int64, device=DEVICE)
        greedy = all(params.temperature == 0 for params in self.requests)
        settings, run = self.settings(), sample_reference if reference else sample
        run(logits.to(DEVICE, copy=True), settings, self.seen, self.counts, self.bias, scratch, out, greedy)
        self.count += 1
        return out.tolist()


def _logits(rows: int, vocab_size: int, seed: int, step: float = 0.0) -> torch.Tensor:
    """With `step`, rounded to multiples of it: many ties."""
    values = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return (values / step).round() * step if step else values


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(("vocab_size", "step"), [(300, 0.0), (300, 0.5), (9001, 0.0)])
def test_draws_are_those_of_the_cpu(vocab_size: int, step: float, reference: bool) -> None:
    requests = REQUESTS if vocab_size < 1000 else [REQUESTS[i] for i in (1, 3, 5, 10)]
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
        settings | {"uniform": 0.99, "top_k": 2, "state_row": 0},
        settings | {"uniform": 0.99, "top_p": 0.3, "state_row": 1},
        settings | {"uniform": 0.0, "top_k": 2, "state_row": 2},
        settings | {"temperature": 0.0, "state_row": 3},
    ]
    table = torch.tensor([[row.get(name, 0.0) for name in SETTINGS] for row in rows], dtype=torch.float64)
    tensors = _tensors(logits.expand(4, 8).contiguous(), table, states=4)
    sample(*tensors, False)
    assert tensors[-1].tolist() == [6, 6, 1, 1]
    assert tensors[2].nonzero().tolist() == [[0, 6], [1, 6], [2, 1], [3, 1]]
    assert tensors[3].sum(1).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("run", [sample, sample_reference], ids=["kernel", "reference"])
def test_a_row_that_is_not_finite_says_so_and_is_not_counted(run: Callable[..., None]) -> None:
    """Also where its bias takes the bad token out; the row beside it is drawn as ever."""
    logits = torch.arange(16.0).repeat(4, 1)
    logits[:3, 5] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    table = torch.zeros(4, len(SETTINGS), dtype=torch.float64)
    for column, values in {
        "temperature": (0.0, 1.0, 1.0, 1.0),
        "top_k": (0, 0, 3, 1),
        "top_p": (1.0, 1.0, 0.5, 1.0),
        "repetition_penalty": (1.0, 1.0, 1.0, 1.0),
        "biased": (1, 0, 0, 0),
        "state_row": (0, 1, 2, 3),
    }.items():
        table[:, SETTINGS.index(column)] = torch.tensor(values, dtype=torch.float64)
    tensors = _tensors(logits, table, states=4)
    tensors[4][0, 5] = -torch.inf
    run(*tensors, False)
    assert tensors[-1].tolist() == [NOT_FINITE, NOT_FINITE, NOT_FINITE, 15]
    assert tensors[2].nonzero().tolist() == [[3, 15]] and tensors[3].sum(1).tolist() == [0, 0, 0, 1]


def test_logits_of_neutral_rows_are_left_alone() -> None:
    """The torch sampler reads them after the kernel."""
    rows = _Rows([SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, presence_penalty=1.0)], 40, [], [3])
    logits = _logits(2, 40, seed=1).to(DEVICE)
    scratch, out = torch.zeros(2, scratch_width(40), dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    before = logits.clone()
    sample(logits, rows.settings(), rows.seen, rows.counts, rows.bias, scratch.to(DEVICE), out.to(DEVICE), True)
    assert torch.equal(logits[0], before[0]) and logits[1, 3] == before[1, 3] - 1.0


def _tensors(logits: torch.Tensor, table: torch.Tensor, states: int) -> list[torch.Tensor]:
    """All tensors of `sample`, in its order, with empty states."""
    rows, vocab_size = logits.shape
    seen, counts = torch.zeros(states, vocab_size, dtype=torch.bool), torch.zeros(states, vocab_size, dtype=torch.int32)
    scratch, out = torch.empty(rows, scratch_width(vocab_size), dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    return [t.to(DEVICE) for t in (logits, table, seen, counts, torch.zeros(states, vocab_size), scratch, out)]


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
    settings[:, SETTINGS.index("state_row")] = torch.arange(rows)
    sample_reference(logits.expand(rows, 4), settings, seen, counts, seen, seen, out, False)
    shares = np.bincount(out.numpy(), minlength=4) / rows
    np.testing.assert_allclose(shares, logits.softmax(0).numpy(), atol=2e-3)


def test_other_shapes_are_refused() -> None:
    tensors = _tensors(torch.zeros(1, 4), torch.zeros(1, len(SETTINGS), dtype=torch.float64), states=2)
    with pytest.raises(ValueError, match="settings must be"):
        launch_sample(tensors[0], tensors[1].float(), *tensors[2:], False)
    with pytest.raises(ValueError, match="bias must be"):
        launch_sample(*tensors[:4], tensors[4][:1], *tensors[5:], False)
    with pytest.raises(ValueError, match="scratch must be"):
        launch_sample(*tensors[:5], tensors[5][:, :3], tensors[6], False)
