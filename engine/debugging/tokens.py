"""The token table: what the model thought of each token of a reply, and where the token's K and V lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.debugging.protocol import TokenQuery
from engine.debugging.replays import KeptAs, check_room, follow
from engine.debugging.scratch import logits_behind
from engine.errors import InvalidRequest
from engine.jobs import Slices
from engine.kv_cache.origin import Origin
from engine.kv_cache.prefixes import common_prefix_len
from engine.lane import Lane
from engine.loader import EngineParts
from engine.sampling.measure import measure
from engine.sampling.params import check_whole
from engine.sequence import Sequence as EngineSequence

MAX_COUNT = 256
ALTERNATIVES = 5
ROWS = 4
"""Tokens that are run behind the cache in one slice: more are no quicker, and streams wait for each slice."""


def check_query(query: TokenQuery) -> None:
    """Raises `InvalidRequest`."""
    check_whole("start", query.start, 0, 2**31 - 1)
    check_whole("count", query.count, 1, MAX_COUNT)
    if not query.prompt_ids:
        raise InvalidRequest("The prompt of this reply can't be rendered any more.")


def token_rows(loop: Lane, parts: EngineParts, query: TokenQuery) -> Slices[list[dict[str, Any]]]:
    """`{logprob, rank, entropy, top1, top}` of tokens `start : start + count`.

    `top` are the `ALTERNATIVES` likeliest tokens, `{token_id, token, logprob}`, the token itself among them if it is
    one. All under the model itself, before penalties, temperature and filters: run again behind what the session's
    cache holds of the tokens before, a few at a time, or, where it does not hold them, in one replay of all ids.
    """
    reply = query.reply_ids[: query.start + query.count]
    rows: list[dict[str, Any]] = []
    while query.start + len(rows) < len(reply):
        logits = _behind_cache(loop, parts, query, query.start + len(rows), len(reply))
        if logits is None:
            break
        rows += [_row(parts, one, reply[query.start + len(rows) + i]) for i, one in enumerate(logits)]
        yield
    if query.start + len(rows) < len(reply):
        check_room(parts, len(query.prompt_ids) + len(reply))
        first = query.start + len(rows)

        def take(index: int, logits: Tensor) -> None:
            if index >= first:
                rows.append(_row(parts, logits, reply[index]))

        yield from follow(parts, KeptAs(parts.cache.spec, parts.cache.balance), query.prompt_ids, reply, take)
    return rows


def _behind_cache(loop: Lane, parts: EngineParts, query: TokenQuery, first: int, end: int) -> Tensor | None:
    """float32 logits [n, V] before the reply's tokens `first : first + n`, of at most `end`; None where the session's
    cache does not hold all that stands before the first of them, or what it holds gives nothing finite."""
    history = (*query.prompt_ids, *query.reply_ids[:end])
    start = len(query.prompt_ids) + first - 1
    sequence = loop.scheduler.find(query.session_id)
    if sequence is None or _held(sequence, history[:start]) < start:
        return None
    logits = logits_behind(loop, parts, sequence, history[start : min(start + ROWS, len(history) - 1)], start)
    return logits if logits is not None and bool(torch.isfinite(logits).all()) else None


def _row(parts: EngineParts, logits: Tensor, token_id: int) -> dict[str, Any]:
    found = measure(logits.float().cpu(), token_id)
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    best = torch.topk(logprobs, min(ALTERNATIVES, len(logprobs)))
    top = [
        {"token_id": other, "token": parts.tokenizer.token_text(other), "logprob": round(value, 6)}
        for other, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return {**rounded(found.logprob, found.rank, found.entropy, found.top1), "top": top}


def rounded(logprob: float, rank: int, entropy: float, top1: float) -> dict[str, Any]:
    """The fields of a measure as the table shows them."""
    return {"logprob": round(logprob, 6), "rank": rank, "entropy": round(entropy, 6), "top1": round(top1, 6)}


def places(loop: Lane, query: TokenQuery) -> list[dict[str, Any]]:
    """`{block, slot, origin}` of the same tokens; all None where the session's cache does not hold them now.

    `slot` is the place within the block. A cached position counts only if all ids up to it are those of the reply.
    """
    sequence = loop.scheduler.find(query.session_id)
    end = min(query.start + query.count, len(query.reply_ids))
    first, stop = len(query.prompt_ids) + query.start, len(query.prompt_ids) + end
    held = 0 if sequence is None else _held(sequence, (*query.prompt_ids, *query.reply_ids[:end]))
    nowhere: dict[str, Any] = {"block": None, "slot": None, "origin": None}
    return [_place(sequence, p) if sequence is not None and p < held else nowhere for p in range(first, stop)]


def _held(sequence: EngineSequence, history: Sequence[int]) -> int:
    cached = sequence.token_ids[: sequence.cache_pos]
    return common_prefix_len(cached, history)


def _place(sequence: EngineSequence, position: int) -> dict[str, Any]:
    index, slot = divmod(position, sequence.block_size)
    block = sequence.block_table[index] or None if sequence.block_table else None  # a window may have passed it
    return {"block": block, "slot": slot, "origin": Origin(sequence.origins[position]).name.lower()}
