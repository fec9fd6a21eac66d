"""A reply run again beside the live cache: along its own ids, or drawing anew from some token on. In slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.debugging.loops import LoopDetector
from engine.debugging.precision import balance_of, check_scratch
from engine.errors import NonFiniteValues
from engine.jobs import Slices
from engine.kv_cache.spec import KVCacheSpec
from engine.loader import EngineParts
from engine.protocol import Loop
from engine.replay import Replay
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler, SamplingState, candidates
from kernels.kv_format import KV_FORMATS

ROWS = 16
"""Tokens of a reply that are run in one slice."""
BESIDE = 8
"""Blocks of replays that are not full, or null blocks."""
TakeRow = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class KeptAs:
    """How a replay keeps K and V. `balance` as in `KVCache`."""

    spec: KVCacheSpec
    balance: Tensor | None


@dataclass(frozen=True, slots=True)
class Redrawn:
    """Ids drawn anew; `loop` is the one that they ran into, where drawing stops. Its start counts from the reply's."""

    token_ids: tuple[int, ...]
    loop: Loop | None
    ended: bool


def kept_as(parts: EngineParts, kv_format: str) -> Slices[KeptAs]:
    """A replay in this format, with the balance that a cache of it has with this model."""
    spec = replace(parts.cache.spec, format=KV_FORMATS[kv_format])
    return KeptAs(spec, (yield from balance_of(parts, spec)))


def check_room(parts: EngineParts, tokens: int) -> None:
    """Raises `InvalidRequest` if a float32 cache of so many tokens doesn't fit into what the budget has left."""
    spec = replace(parts.cache.spec, format=KV_FORMATS["fp32"])
    if spec.num_layers:
        check_scratch(parts, (-(-tokens // spec.block_size) + BESIDE) * spec.block_bytes)


def follow(
    parts: EngineParts, kept: KeptAs, prompt: Sequence[int], reply: Sequence[int], take: TakeRow, rows: int = ROWS
) -> Slices[None]:
    """Run prompt and reply anew; `take` gets, for each index of the reply, the float32 logits [V] before that token.

    `rows` tokens of the reply are run at a time. Raises `NonFiniteValues`.
    """
    replay = Replay(parts.model, kept.spec, len(prompt) + len(reply), kept.balance)
    logits = yield from replay.slices(prompt, 1, parts.limits.mixed_batch_tokens - ROWS + rows)
    take(0, _finite(logits)[-1])
    run = reply[:-1]
    for start in range(0, len(run), rows):
        yield
        part = run[start : start + rows]
        logits = yield from replay.slices(part, len(part), rows)
        for offset, row in enumerate(_finite(logits), start=1):
            take(start + offset, row)


def redraw(
    parts: EngineParts,
    kept: KeptAs,
    prompt: Sequence[int],
    before: Sequence[int],
    settings: Sequence[SamplingParams],
    count: int,
    is_word: Callable[[int], bool],
) -> Slices[list[Redrawn]]:
    """Draw at most `count` ids after prompt and the reply's first ids `before`, from a fresh prefill of both; once by
    each of the settings, side by side.

    The random numbers are those of the reply's tokens from there on. It ends when the first one and so many others are
    through that most agree on whether there is a loop; what others drew by then is left out. Raises `NonFiniteValues`.
    """
    length = len(prompt) + len(before)
    replay = Replay(parts.model, kept.spec, length, kept.balance, branches=len(settings), branch_tokens=count)
    ends = frozenset() if settings[0].ignore_eos else parts.tokenizer.eos_ids
    logits = yield from replay.slices((*prompt, *before), 1, parts.limits.mixed_batch_tokens)
    logits = logits[-1:].expand(len(settings), -1)
    texts = [_Text(params, prompt, before, parts.vocab_size, is_word) for params in settings]
    running = list(zip(texts, replay.branch(len(texts)), strict=True))
    while True:
        found = Sampler().sample(_finite(logits), [text.state for text, _ in running]).token_ids
        for (text, _), token_id in zip(running, found, strict=True):
            assert token_id is not None  # it is no draft
            text.take(token_id, ends, count)
        running = [(text, sequence) for text, sequence in running if text.result is None]
        done = [text.result for text in texts if text.result is not None]
        if not running or (texts[0].result is not None and _most_agree(done, len(texts))):
            return done
        yield
        logits = replay.step([sequence for _, sequence in running], [text.drawn[-1] for text, _ in running])


class _Text:
    """What one sampler draws; `result` once it is through."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        before: Sequence[int],
        vocab_size: int,
        is_word: Callable[[int], bool],
    ) -> None:
        self.state, self._detector = SamplingState(params, prompt, vocab_size), LoopDetector(is_word)
        self.drawn: list[int] = []
        self.result: Redrawn | None = None
        for token_id in before:
            self.state.accept(token_id)
            self._detector.push(token_id)

    def take(self, token_id: int, ends: frozenset[int], most: int) -> None:
        if token_id in ends:
            self.result = Redrawn(tuple(self.drawn), None, True)
            return
        self.drawn.append(token_id)
        loop = self._detector.push(token_id)
        if loop is not None or len(self.drawn) >= most:
            self.result = Redrawn(tuple(self.drawn), loop, False)


def _most_agree(done: Sequence[Redrawn], total: int) -> bool:
    looped = sum(one.loop is not None for one in done)
    return 2 * max(looped, len(done) - looped) > total


def distance_from_draw(logits: Tensor, state: SamplingState, token_id: int) -> float:
    """How much probability lies between the next draw and `token_id`, from logits float32 [V]; 0 if it is drawn.

    Greedy: how much likelier the likeliest token is. Else the distance of the random number from the token's share of
    what can be drawn; 1 where it can't be.
    """
    row = state.adjust(logits)
    if state.params.temperature == 0:
        probabilities = torch.softmax(row.double(), dim=-1)
        return float(probabilities.max() - probabilities[token_id])
    ids, kept = candidates(row, state.params)
    places = torch.nonzero(ids == token_id)
    if not len(places):
        return 1.0
    shares = torch.softmax(kept.double(), dim=-1)
    place = int(places[0])
    low, high = float(shares[:place].sum()), float(shares[: place + 1].sum())
    return max(low - state.next_uniform(), state.next_uniform() - high, 0.0)


def _finite(logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteValues("The model produced values that are not finite.")
    return logits
