"""Draws the next token of each request. A request's whole random state is its seed and its number of tokens so far."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling import processors
from engine.sampling.params import SamplingParams, check_vocabulary

_NUMBERS_AHEAD = 64  # making a generator takes 30 times as long as a number does

LogitsHook = Callable[[Tensor, Sequence[int]], Tensor]
"""Gets one row of logits float32 [V] and the reply's ids so far; returns the row to go on with."""


def fresh_seed() -> int:
    """A seed for a request that brings none, short enough to read out."""
    return secrets.randbelow(2**31)


def uniform(seed: int, count: int) -> float:
    """The random number in [0, 1) of a reply's token `count`: counter-based, so it depends on nothing else."""
    return _uniforms(seed, count, 1)[0]


def _uniforms(seed: int, first: int, number: int) -> list[float]:
    """Those of `number` tokens that follow each other. A value of the counter gives four numbers; one is used."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=first))
    return [float(value) for value in generator.random(4 * number)[::4]]


@dataclass(frozen=True, slots=True)
class SampledLogprob:
    """Natural log probabilities under the model itself, before penalties, bias, temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One entry per row of logits, in order. `token_ids[i]` is None where the row's draft did not come true,
    `logprobs[i]` unless the request asked for them."""

    token_ids: list[int | None]
    logprobs: list[SampledLogprob | None]


class SamplingState:
    """What the sampler keeps of one request: settings, seed, the tokens so far.

    `seen` bool [V] (prompt and reply) is there if the repetition penalty is not neutral, `counts` int32 [V] (reply) if
    one of the other two is not.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        hooks: Iterable[LogitsHook] = (),
    ) -> None:
        """Raises `InvalidRequest` if `logit_bias` names a token that the model does not have."""
        check_vocabulary(params, vocab_size)
        self.params = params
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.hooks = tuple(hooks)
        self.reply_ids: list[int] = []
        self._numbers: list[float] = []
        self._numbers_from = 0
        self.seen: Tensor | None = None
        self.counts: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[[token_id for token_id in set(prompt_ids) if token_id < vocab_size]] = True
        if params.presence_penalty or params.frequency_penalty:
            self.counts = torch.zeros(vocab_size, dtype=torch.int32)

    @property
    def generated_count(self) -> int:
        return len(self.reply_ids)

    def next_uniform(self, ahead: int = 0) -> float:
        """The random number of the token to come, or of the one that comes `ahead` tokens later."""
        index = self.generated_count + ahead - self._numbers_from
        if not 0 <= index < len(self._numbers):
            index, self._numbers_from = ahead, self.generated_count
            self._numbers = _uniforms(self.seed, self._numbers_from, _NUMBERS_AHEAD)
        return self._numbers[index]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is simply the largest logit."""
        return (
            self.params.temperature == 0
            and self.seen is None
            and self.counts is None
            and not self.params.logit_bias
            and not self.hooks
        )

    def accept(self, token_id: int) -> None:
        """Count a token into the reply."""
        self.reply_ids.append(token_id)
        if self.seen is not None:
            self.seen[token_id] = True
        if self.counts is not None:
            self.counts[token_id] += 1

    def adjust(self, row: Tensor) -> Tensor:
        """Penalties, bias and hooks on one row float32 [V]; the row itself is left alone."""
        params = self.params
        if self.seen is not None:
            self.seen = self.seen.to(row.device)
            row = processors.apply_repetition_penalty(row, self.seen, params.repetition_penalty)
        if self.counts is not None:
            self.counts = self.counts.to(row.device)
            row = processors.apply_count_penalties(row, self.counts, params.presence_penalty, params.frequency_penalty)
        if params.logit_bias:
            row = processors.apply_logit_bias(row, params.logit_bias)
        for hook in self.hooks:
            row = hook(row, tuple(self.reply_ids))
        return row


class Sampler:
    """Stateless: everything that lasts is in the requests' `SamplingState`."""

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        requests: Sequence[SamplingState],
        forced: Sequence[int | None] | None = None,
        drafts: Sequence[int | None] | None = None,
    ) -> SampledTokens:
        """One token per row of logits float32 [N, V], counted into the state of its request.

        `forced[i]`, where given, is taken in place of a draw. A row's token does not depend on the other rows, but
        where `drafts[i]` is given the row counts only if that was drawn from the row before it: then it is what that
        request's next step would have been. Logits must be finite.
        """
        greedy = _lowest_argmax(logits) if any(state.is_plain_greedy for state in requests) else []
        token_ids: list[int | None] = []
        logprobs: list[SampledLogprob | None] = []
        for index, state in enumerate(requests):
            draft = drafts[index] if drafts is not None else None
            if draft is not None and token_ids[index - 1] != draft:
                token_ids.append(None)
                logprobs.append(None)
                continue
            token_id = forced[index] if forced is not None else None
            if token_id is None:
                token_id = greedy[index] if state.is_plain_greedy else _draw(logits[index], state)
            token_ids.append(token_id)
            logprobs.append(_logprob(logits[index], token_id, state.params.top_logprobs))
            state.accept(token_id)
        return SampledTokens(token_ids, logprobs)


def candidates(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Temperature and filters on one row float32 [V]: `(ids int64 [C] ascending, logits [C])` of what can be drawn.

    Top-k comes first, on the whole row; it commutes with the temperature, and what follows is small then.
    """
    ids: Tensor | None = None
    if 0 < params.top_k < row.shape[-1]:
        ids, row = _finite_part(processors.apply_top_k(row, params.top_k))
    row = processors.apply_temperature(row, params.temperature)
    row = processors.apply_min_p(processors.apply_top_p(row, params.top_p), params.min_p)
    kept, logits = _finite_part(row)
    return (kept if ids is None else ids[kept]), logits


def _finite_part(row: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.nonzero(row > -torch.inf).squeeze(-1)
    return ids, row[ids]


def _draw(row: Tensor, state: SamplingState) -> int:
    adjusted = _drawable(state.adjust(row), row)
    if state.params.temperature == 0:
        return _lowest_argmax(adjusted[None])[0]
    ids, logits = candidates(adjusted, state.params)
    weights = torch.exp(logits.double()).cpu().numpy()
    # In the order of ids: the draw is the same whatever order a sort would give to equal logits.
    cumulative = np.cumsum(weights)
    wanted = state.next_uniform() * cumulative[-1]
    index = int(np.searchsorted(cumulative, wanted, side="right"))
    last = int(np.flatnonzero(weights)[-1])
    return int(ids[min(index, last)])


def _drawable(adjusted: Tensor, row: Tensor) -> Tensor:
    """Hooks may ban everything (then the model's own logits count) or set +inf (then only those tokens count)."""
    top = float(adjusted.max())
    if top == -torch.inf or top != top:
        return row
    if top == torch.inf:
        return torch.where(adjusted == torch.inf, 0.0, -torch.inf)
    return adjusted


def _lowest_argmax(logits: Tensor) -> list[int]:
    """Per row of [N, V] the id of the largest logit, the lowest id on ties."""
    if logits.device.type == "cpu":
        return [int(index) for index in logits.numpy().argmax(axis=-1)]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    best = logits.amax(dim=-1, keepdim=True)
    tied = torch.where(logits == best, ids, logits.shape[-1])
    return [int(index) for index in tied.amin(dim=-1).tolist()]


def _logprob(row: Tensor, token_id: int, top: int | None) -> SampledLogprob | None:
    if top is None:
        return None
    logprobs = torch.log_softmax(row.double(), dim=-1)
    best = torch.topk(logprobs, min(top, row.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return SampledLogprob(token_id, float(logprobs[token_id]), tuple(pairs))
