"""What penalties and biases need on the device: a row of the vocabulary's width for each request that has any."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.sampling.processors import apply_logit_bias
from engine.sampling.sampler import SamplingState


@dataclass(slots=True)
class _Row:
    index: int
    counted: int


class RowStates:
    """The tensors seen (bool), counts (int32) and bias (float32), [rows, V], of the kernel `sample`.

    A row is written when a request takes it, which only moves tensors to the device; then the kernel counts each token
    into it. Row 0 is for all requests with neither penalties nor bias.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(rows, vocab_size, device=device)
        self._free = list(range(rows - 1, 0, -1))
        self._taken: dict[SamplingState, _Row] = {}

    def keep(self, states: Iterable[SamplingState]) -> None:
        """Only these hold on to their rows; a request that comes back later gets one anew."""
        for state in self._taken.keys() - set(states):
            self._free.append(self._taken.pop(state).index)

    def row_of(self, state: SamplingState) -> int:
        """The request's row, up to date."""
        row = self._taken.get(state)
        if row is None:
            row = self._taken[state] = _Row(self._free.pop(), -1)
        if row.counted != state.generated_count:
            self._write(row.index, state)
            row.counted = state.generated_count
        return row.index

    def count(self, state: SamplingState) -> None:
        """The kernel has counted a token into the request's row."""
        if state in self._taken:
            self._taken[state].counted += 1

    def _write(self, index: int, state: SamplingState) -> None:
        """What the request doesn't use stays as the last owner left it: the kernel does not read it."""
        if state.seen is not None:
            self.seen[index].copy_(state.seen)
        if state.counts is not None:
            self.counts[index].copy_(state.counts)
        if state.params.logit_bias:
            nothing = torch.zeros(self.bias.shape[1])
            self.bias[index].copy_(apply_logit_bias(nothing, state.params.logit_bias))


def needs_row(state: SamplingState) -> bool:
    """Whether the next token depends on more than logits and settings."""
    return state.seen is not None or state.counts is not None or bool(state.params.logit_bias)
