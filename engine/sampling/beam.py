"""Beam search over scores: which beams live on, which end, and when no better one can come. No tensors, no blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.sampling.params import MAX_TOP_LOGPROBS, SamplingParams, check_number, check_whole

MAX_BEAMS = 8
NEVER = "never"
NEUTRAL = SamplingParams()


@dataclass(frozen=True, slots=True)
class BeamParams:
    """One beam is no beam search.

    A finished beam's score is the sum of its tokens' log probabilities over its length to the power of
    `length_penalty`: above 0 favours long replies. The search ends once no running beam can do better, judged by the
    present length (`early_stopping` False), by the length that favours it most ("never"), or as soon as there are
    `num_beams` finished ones (True): the rules of `transformers.generate`.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check_whole("num_beams", self.num_beams, 1, MAX_BEAMS)
        check_number("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != NEVER:
            raise InvalidRequest(f'early_stopping must be true, false or "{NEVER}", not {self.early_stopping!r:.40}.')

    @property
    def searches(self) -> bool:
        return self.num_beams > 1


def check_settings(beams: BeamParams, params: SamplingParams) -> None:
    """Raises `InvalidRequest` for settings that change scores or report them token by token.

    What shapes a draw (temperature, top-k, top-p, min-p, seed) has no say: nothing is drawn.
    """
    if not beams.searches:
        return
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(params, name) != getattr(NEUTRAL, name):
            raise InvalidRequest(f"{name} can't be combined with num_beams: beams are scored by the model alone.")
    if params.logit_bias:
        raise InvalidRequest("logit_bias can't be combined with num_beams: beams are scored by the model alone.")
    if params.top_logprobs is not None:
        raise InvalidRequest("logprobs can't be combined with num_beams.")


def candidates_per_beam(num_beams: int, end_tokens: int) -> int:
    """Likeliest tokens to look at of each beam, so that `num_beams` can go on even if all end tokens are among them."""
    return min(num_beams + end_tokens, MAX_TOP_LOGPROBS)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A reply that has ended, its end token included; `parent` is the number of the beam that it ended in."""

    token_ids: tuple[int, ...]
    score: float
    parent: int


@dataclass(frozen=True, slots=True)
class LiveBeam:
    """A reply that goes on: `parent` is the number of the beam it continues, `logprob` the sum over its tokens."""

    token_ids: tuple[int, ...]
    logprob: float
    parent: int


class BeamSearch:
    """The search for one reply of at most `max_tokens` tokens. `live` and `finished` are in order, best first.

    `ends` says of a reply's ids whether it is over with the last of them.
    """

    def __init__(self, params: BeamParams, max_tokens: int, ends: Callable[[Sequence[int]], bool]) -> None:
        self.live: list[LiveBeam] = [LiveBeam((), 0.0, 0)]
        self.finished: list[Hypothesis] = []
        self.done = False
        self._params = params
        self._max_tokens = max_tokens
        self._ends = ends

    def step(self, tops: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Continue the live beams; `tops[i]` are (token id, log probability) of the likeliest tokens after beam i.

        Only candidates among the best `num_beams` may finish; of the rest, the best that do not end go on.
        """
        count = self._params.num_beams
        candidates = [
            LiveBeam((*beam.token_ids, token_id), beam.logprob + logprob, index)
            for index, (beam, top) in enumerate(zip(self.live, tops, strict=True))
            for token_id, logprob in top
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        length = len(candidates[0].token_ids)
        self.live = []
        for rank, beam in enumerate(candidates):
            if rank >= count and len(self.live) >= count:
                break
            if length < self._max_tokens and not self._ends(beam.token_ids):
                self.live.append(beam)
            elif rank < count:
                self.finished.append(Hypothesis(beam.token_ids, self._score(beam.logprob, length), beam.parent))
        self.finished = sorted(self.finished, key=lambda found: -found.score)[:count]
        self.done = not self.live or self._is_settled(length)

    def best(self) -> Hypothesis:
        """The winner, or, while the search is under way, what is best so far."""
        if self.finished:
            return self.finished[0]
        return Hypothesis(self.live[0].token_ids, self.scores()[0], self.live[0].parent)

    def scores(self) -> list[float]:
        """Of the live beams, as if they ended here."""
        return [self._score(beam.logprob, len(beam.token_ids)) for beam in self.live]

    def _is_settled(self, length: int) -> bool:
        if len(self.finished) < self._params.num_beams:
            return False
        if self._params.early_stopping is True:
            return True
        if self._params.early_stopping == NEVER and self._params.length_penalty > 0:
            length = self._max_tokens
        return self._score(self.live[0].logprob, length) <= self.finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / max(length, 1) ** self._params.length_penalty
