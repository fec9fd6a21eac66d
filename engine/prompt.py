"""Making a conversation fit the context: whole oldest turns leave, the system prompt and the last question never."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from engine.errors import ContextOverflow
from engine.protocol import ChatMessage, Prompt, Span

_SHARE_AFTER_DROP = 0.75


class ConversationRenderer(Protocol):
    """What is needed of a `ChatTokenizer` here."""

    def render(
        self,
        messages: Sequence[ChatMessage],
        date: datetime,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
    ) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A prompt that fits. `dropped` are the indexes of messages left out; spans of `prompt` use the indexes given.

    `first_kept` is the index of the first message that is not a system message and not dropped; hand it in again with
    the next turn, so that the prompt keeps its beginning, and the cache stays valid, until it has to move.
    """

    prompt: Prompt
    dropped: tuple[int, ...]
    first_kept: int


def effective_max_tokens(prompt_len: int, limit: int, max_tokens: int | None) -> int:
    """New tokens that a reply may have: as asked, or all that the context has room for (below 1 if it is full)."""
    room = limit - prompt_len
    return room if max_tokens is None else min(max_tokens, room)


def fit_prompt(
    tokenizer: ConversationRenderer,
    messages: Sequence[ChatMessage],
    date: datetime,
    context_limit: int,
    reserve: int,
    first_kept: int | None = None,
) -> FittedPrompt:
    """Render the messages into at most `context_limit - reserve` tokens, dropping whole oldest turns if need be.

    A turn is a user message with what follows it up to the next one. When turns have to go, so many go that at most
    three quarters of the limit are left, so that the next few turns go without. `reserve` counts for at most half of
    the limit: a reply that may be endless is no reason to forget the conversation. If system prompt and last turn
    alone exceed the limit less `reserve`, the reply gets the room there is; if there is none, `ContextOverflow`.
    """
    head = _system_count(messages)
    starts = _turn_starts(messages, head)
    room = context_limit - min(max(reserve, 1), context_limit // 2)
    chosen = max((start for start in starts if first_kept is not None and start <= first_kept), default=starts[0])
    prompt = _render_from(tokenizer, messages, date, head, chosen)
    if len(prompt.token_ids) > room and chosen != starts[-1]:
        target = min(room, int(context_limit * _SHARE_AFTER_DROP))
        later = starts[starts.index(chosen) + 1 :]
        chosen, prompt = _first_that_fits(tokenizer, messages, date, head, later, target)
    if len(prompt.token_ids) >= context_limit:
        raise ContextOverflow(
            f"The prompt has {len(prompt.token_ids)} tokens even without earlier turns, and the context holds"
            f" {context_limit}; shorten the message or the system prompt."
        )
    return FittedPrompt(prompt, tuple(range(head, chosen)), chosen)


def _system_count(messages: Sequence[ChatMessage]) -> int:
    count = 0
    while count < len(messages) and messages[count].role in ("system", "developer"):
        count += 1
    return count


def _turn_starts(messages: Sequence[ChatMessage], head: int) -> list[int]:
    """Where a prompt may begin: at its first message, and at every user message, ascending, at least one."""
    users = [index for index in range(head, len(messages)) if messages[index].role == "user"]
    return sorted({head, *users})


def _first_that_fits(
    tokenizer: ConversationRenderer,
    messages: Sequence[ChatMessage],
    date: datetime,
    head: int,
    starts: Sequence[int],
    target: int,
) -> tuple[int, Prompt]:
    """The earliest start whose prompt has at most `target` tokens, by halving; the last start if none has."""
    low, high = 0, len(starts) - 1
    prompts: dict[int, Prompt] = {}
    while low < high:
        middle = (low + high) // 2
        prompts[middle] = _render_from(tokenizer, messages, date, head, starts[middle])
        if len(prompts[middle].token_ids) <= target:
            high = middle
        else:
            low = middle + 1
    return starts[low], prompts.get(low) or _render_from(tokenizer, messages, date, head, starts[low])


def _render_from(
    tokenizer: ConversationRenderer, messages: Sequence[ChatMessage], date: datetime, head: int, start: int
) -> Prompt:
    continued = messages[-1].role == "assistant"
    prompt = tokenizer.render([*messages[:head], *messages[start:]], date, not continued, continue_last=continued)
    left_out = start - head
    spans = (Span(s.message + left_out * (s.message >= head), s.start, s.end) for s in prompt.spans)
    return Prompt(prompt.token_ids, tuple(spans))
