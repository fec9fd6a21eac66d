"""The end of a step: what of it is finite, and the next token of each sequence that wants one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol import TokenMeasure
from engine.sampling.measure import measure
from engine.sampling.sampler import SampledLogprob, Sampler, SamplingState

Forced = Sequence[int | None]
"""Per row of logits the id to take in place of a draw, or None."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the model made of a batch of S sequences with T tokens in all.

    hidden      [T, hidden]        after the final norm
    logits      float32 [N, vocab]
    query_lens  S numbers          tokens of each sequence
    wanted      N numbers          of each row of logits, its sequence's place in the batch
    """

    hidden: Tensor
    logits: Tensor
    query_lens: tuple[int, ...]
    wanted: tuple[int, ...]


class StepTokens:
    """`finite`: a flag per sequence of the batch. `token_ids`, `logprobs`, `measures`: an entry per row of logits,
    which means nothing where the sequence is not finite; measures are None where logits are not on the host."""

    def __init__(self, finite: list[bool], rows: int) -> None:
        self.finite = finite
        self.token_ids = [0] * rows
        self.logprobs: list[SampledLogprob | None] = [None] * rows
        self.measures: list[TokenMeasure | None] = [None] * rows

    def draw(self, rows: Sequence[int], output: StepOutput, requests: Sequence[SamplingState], forced: Forced) -> None:
        """Have these rows of logits drawn by the sampler in torch."""
        if not rows:
            return
        logits = output.logits if len(rows) == len(output.logits) else output.logits[list(rows)]
        sampled = Sampler().sample(logits, [requests[row] for row in rows], [forced[row] for row in rows])
        for row, token_id, logprob in zip(rows, sampled.token_ids, sampled.logprobs, strict=True):
            self.token_ids[row] = token_id
            self.logprobs[row] = logprob
        if logits.device.type == "cpu":
            for row, values in zip(rows, logits, strict=True):
                self.measures[row] = measure(values, self.token_ids[row])

    def drop(self, sequences: Iterable[int]) -> None:
        """These are not finite."""
        for index in sequences:
            self.finite[index] = False


def sample_on_host(output: StepOutput, requests: Sequence[SamplingState], forced: Forced) -> StepTokens:
    """Check and draw with torch: on a device each check and each draw waits for it."""
    tokens = StepTokens(_finite_sequences(output.hidden, output.query_lens), len(requests))
    wanted = output.wanted
    tokens.drop(index for row, index in enumerate(wanted) if not bool(torch.isfinite(output.logits[row]).all()))
    tokens.draw([row for row, index in enumerate(wanted) if tokens.finite[index]], output, requests, forced)
    return tokens


def _finite_sequences(hidden: Tensor, query_lens: tuple[int, ...]) -> list[bool]:
    """A token's own K and V take part in its output, so a bad value anywhere shows in the token's last hidden row."""
    sums = hidden.float().sum(dim=-1)
    if bool(torch.isfinite(sums.sum())):
        return [True] * len(query_lens)
    return [bool(torch.isfinite(rows).all()) for rows in sums.split(list(query_lens))]
