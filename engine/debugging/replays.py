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


def check_room(parts: EngineParts, tokens: int, caches: int = 1) -> None:
    """Raises `InvalidRequest` if `caches` float32 caches of so many tokens don't fit into what the budget has left."""
    spec = replace(parts.cache.spec, format=KV_FORMATS["fp32"])
    if spec.num_layers:
        check_scratch(parts, caches * (-(-tokens // spec.block_size) + 1) * spec.block_bytes)


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
    params: SamplingParams,
    count: int,
    is_word: Callable[[int], bool],
) -> Slices[Redrawn]:
    """Draw at most `count` ids after prompt and the reply's first ids `before`, from a fresh prefill of both.

    The random numbers are those of the reply's tokens from there on. Raises `NonFiniteValues`.
    """
    replay = Replay(parts.model, kept.spec, len(prompt) + len(before) + count, kept.balance)
    state, detector = SamplingState(params, prompt, parts.vocab_size), LoopDetector(is_word)
    for token_id in before:
        state.accept(token_id)
        detector.push(token_id)
    ends = frozenset() if params.ignore_eos else parts.tokenizer.eos_ids
    logits = yield from replay.slices((*prompt, *before), 1, parts.limits.mixed_batch_tokens)
    drawn: list[int] = []
    while True:
        found = Sampler().sample(_finite(logits)[-1:], [state]).token_ids[0]
        assert found is not None  # it is no draft
        token_id = found
        if token_id in ends:
            return Redrawn(tuple(drawn), None, True)
        drawn.append(token_id)
        loop = detector.push(token_id)
        if loop is not None or len(drawn) >= count:
            return Redrawn(tuple(drawn), loop, False)
        yield
        logits = yield from replay.slices((token_id,), 1, 1)


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
