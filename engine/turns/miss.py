"""Why cached tokens can't be reused: the first place where cache and prompt differ, and the likely cause."""

from __future__ import annotations

from dataclasses import replace

from engine.kv_cache.prefixes import common_prefix_len
from engine.protocol import GenerateRequest, Miss
from engine.sequence import Sequence
from engine.tokenizer import ChatTokenizer

Loss = tuple[str, str | None]
_LOOK_AHEAD = 16
_SHOWN = 12
"""Tokens of text on each side of a miss."""
_THINKING = "<think>"
THINKING_STRIPPED = "The template leaves out the thinking part of an earlier reply."


def find_miss(
    sequence: Sequence, request: GenerateRequest, tokenizer: ChatTokenizer, shared: int = 0, loss: Loss | None = None
) -> Miss | None:
    """Compare a session's cache with its next prompt; None if every cached token can stay. Resets `evicted_from`.

    `shared` tokens of the prompt are in full blocks that other sessions computed; a session without a cache of its own
    begins with them. A recurrent state is lost back to the newest checkpoint before the difference, and with windows
    all is lost back to where the one before is still held.
    `loss`: why what was kept of the session could not be used ("snapshot": it was refused), and the sentence about it.

    The caller's own word for what it did to the history (`request.cause`) comes first. Without one, equal text behind
    the difference means the text was split into other tokens, anything else that the template rendered it differently.
    """
    miss = _find(sequence, request, tokenizer, shared, loss)
    return None if miss is None else _with_texts(miss, sequence.token_ids[: sequence.cache_pos], request, tokenizer)


def _find(
    sequence: Sequence, request: GenerateRequest, tokenizer: ChatTokenizer, shared: int, loss: Loss | None
) -> Miss | None:
    cached, wanted = sequence.token_ids[: sequence.cache_pos], request.prompt_ids
    lost_cause, sentence = loss or (None, None)
    evicted_from, sequence.evicted_from = sequence.evicted_from, 0
    position = common_prefix_len(cached, wanted)
    if position < len(cached):
        cause = request.cause or _guess(cached[position:], list(wanted[position:]), tokenizer)
        limit = position if sequence.state is None else min(position, len(wanted) - 1)
        return _miss(position, cause, cached, wanted, len(cached) - sequence.resume_point(limit))
    if evicted_from > position:
        return _miss(position, lost_cause or "evicted", cached, wanted, evicted_from - position, sentence)
    if not cached and request.stored_cache_pos > shared:
        cause = "model" if request.cause == "model" else lost_cause or "restart"
        return _miss(shared, cause, cached, wanted, request.stored_cache_pos - shared, sentence)
    return None


def _miss(
    position: int, cause: str, cached: list[int], wanted: tuple[int, ...], lost: int, detail: str | None = None
) -> Miss:
    return Miss(
        position=position,
        cause=cause,
        cached_token=cached[position] if position < len(cached) else None,
        wanted_token=wanted[position] if position < len(wanted) else None,
        tokens_lost=lost,
        detail=detail,
    )


def _with_texts(miss: Miss, cached: list[int], request: GenerateRequest, tokenizer: ChatTokenizer) -> Miss:
    position, wanted = miss.position, list(request.prompt_ids)

    def text(token_ids: list[int]) -> str:
        return _spelled(token_ids, tokenizer).decode(errors="replace")

    thinking = miss.cause == "template" and _THINKING in text(cached[max(position - 1, 0) : position + _LOOK_AHEAD])
    stripped = thinking and _THINKING not in text(wanted[max(position - 1, 0) : position + _LOOK_AHEAD])
    return replace(
        miss,
        detail=THINKING_STRIPPED if stripped else miss.detail,
        text_before=text(wanted[max(position - _SHOWN, 0) : position]),
        text_cached=text(cached[position : position + _SHOWN]),
        text_wanted=text(wanted[position : position + _SHOWN]),
    )


def _guess(cached: list[int], wanted: list[int], tokenizer: ChatTokenizer) -> str:
    left, right = _spelled(cached[:_LOOK_AHEAD], tokenizer), _spelled(wanted[:_LOOK_AHEAD], tokenizer)
    length = min(len(left), len(right)) // 2
    return "retokenised" if length and left[:length] == right[:length] else "template"


def _spelled(token_ids: list[int], tokenizer: ChatTokenizer) -> bytes:
    """Control tokens count by their names: other role markers around the same words are another template."""
    return b"".join(tokenizer.shown_bytes(i) or tokenizer.token_text(i).encode() for i in token_ids)
