"""The end of a step: what of it is finite, and the next token of each sequence that wants one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.debugging.protocol import TokenMeasure
from engine.sampling.measure import measure
from engine.sampling.sampler import SampledLogprob, Sampler, SamplingState
from kernels.dispatch import row_measures

Forced = Sequence[int | None]
"""Per row of logits the id to take in place of a draw, or None."""
Drafts = Sequence[int | None]
"""Per row of logits the draft that was run in it, which must have been drawn from the row before for this one to count;
None where it counts anyway."""
Drawn = tuple[int, SampledLogprob | None, TokenMeasure | None]
"""A token that was sampled."""


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
    which means nothing where the sequence is not finite; measures are None where logits are not on the host, ids where
    a draft did not come true."""

    def __init__(self, finite: list[bool], rows: int) -> None:
        self.finite = finite
        self.token_ids: list[int | None] = [None] * rows
        self.logprobs: list[SampledLogprob | None] = [None] * rows
        self.measures: list[TokenMeasure | None] = [None] * rows

    def draw(
        self,
        rows: Sequence[int],
        output: StepOutput,
        requests: Sequence[SamplingState],
        forced: Forced,
        drafts: Drafts | None = None,
    ) -> None:
        """Have these rows of logits drawn by the sampler in torch. The row before a draft's must be among them."""
        if not rows:
            return
        logits = output.logits if len(rows) == len(output.logits) else output.logits[list(rows)]
        own = [drafts[row] for row in rows] if drafts is not None else None
        sampled = Sampler().sample(logits, [requests[row] for row in rows], [forced[row] for row in rows], own)
        for row, token_id, logprob in zip(rows, sampled.token_ids, sampled.logprobs, strict=True):
            self.token_ids[row] = token_id
            self.logprobs[row] = logprob
        if logits.device.type == "cpu":
            for row, values in zip(rows, logits, strict=True):
                token_id = self.token_ids[row]
                self.measures[row] = None if token_id is None else measure(values, token_id)

    def drop(self, sequences: Iterable[int]) -> None:
        """These are not finite."""
        for index in sequences:
            self.finite[index] = False

    def by_item(self, row_counts: Sequence[int]) -> list[tuple[bool, list[Drawn]]]:
        """Of each scheduled item, which has so many rows of logits (0: it wants none), whether it is finite, and its
        tokens: as many as there are rows whose drafts came true."""
        found: list[tuple[bool, list[Drawn]]] = []
        flag = row = 0
        for count in row_counts:
            own = zip(*(of[row : row + count] for of in (self.token_ids, self.logprobs, self.measures)), strict=True)
            drawn = [(token_id, logprob, taken) for token_id, logprob, taken in own if token_id is not None]
            found.append((self.finite[flag], drawn))
            row, flag = row + count, flag + max(count, 1)
        return found


def sample_on_host(
    output: StepOutput, requests: Sequence[SamplingState], forced: Forced, drafts: Drafts | None = None
) -> StepTokens:
    """Check and draw with torch: on a device each check and each draw waits for it."""
    tokens = StepTokens(_finite_sequences(output.hidden, output.query_lens), len(requests))
    wanted = output.wanted
    all_finite = row_measures(output.logits.device.type).all_finite
    tokens.drop(index for row, index in enumerate(wanted) if not all_finite(output.logits[row]))
    rows: list[int] = []
    for row, index in enumerate(wanted):
        follows = drafts is not None and drafts[row] is not None
        if tokens.finite[index] and (not follows or rows[-1:] == [row - 1]):
            rows.append(row)
    tokens.draw(rows, output, requests, forced, drafts)
    return tokens


def _finite_sequences(hidden: Tensor, query_lens: tuple[int, ...]) -> list[bool]:
    """A token's own K and V take part in its output, so a bad value anywhere shows in the token's last hidden row."""
    all_finite, hidden = row_measures(hidden.device.type).all_finite, hidden.float()
    if all_finite(hidden):
        return [True] * len(query_lens)
    return [all_finite(rows) for rows in hidden.split(list(query_lens))]
