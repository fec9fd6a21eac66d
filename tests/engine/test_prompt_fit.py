"""Conversations longer than the context: whole oldest turns leave, the question and the system prompt never."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ContextOverflow
from engine.prompt import effective_max_tokens, fit_prompt
from engine.protocol import ChatMessage
from engine.tokenizer import ChatTokenizer
from tests.support import tiny_tokenizer as tiny

DAY = datetime(2031, 3, 4)
TOKENIZER = ChatTokenizer(tiny.byte_level(eos_token="<|im_end|>"), template="chatml")


def chat(turns: int, size: int = 20, system: str = "Be brief.") -> list[ChatMessage]:
    messages = [ChatMessage("system", system)] if system else []
    for turn in range(turns):
        messages.append(ChatMessage("user", f"question {turn} ".ljust(size, "q")))
        messages.append(ChatMessage("assistant", f"answer {turn} ".ljust(size, "a")))
    return [*messages, ChatMessage("user", "last question")]


def fit(messages, limit, reserve=1, first_kept=None):
    return fit_prompt(TOKENIZER, messages, DAY, limit, reserve, first_kept)


def tokens(messages) -> int:
    return len(TOKENIZER.render(messages, DAY).token_ids)


def test_what_fits_is_left_alone():
    messages = chat(3)
    fitted = fit(messages, tokens(messages) + 10, reserve=10)
    assert fitted.dropped == ()
    assert fitted.first_kept == 1
    assert fitted.prompt == TOKENIZER.render(messages, DAY)


def test_whole_oldest_turns_leave_and_are_named():
    messages = chat(10)
    limit = tokens(messages) - 1
    fitted = fit(messages, limit)
    assert fitted.dropped == tuple(range(1, fitted.first_kept))
    assert messages[fitted.first_kept].role == "user"
    assert len(fitted.prompt.token_ids) <= 0.75 * limit
    earlier = [messages[0], *messages[fitted.first_kept - 2 :]]
    assert tokens(earlier) > 0.75 * limit
    text = TOKENIZER.decode(fitted.prompt.token_ids)
    assert "Be brief." in text and "last question" in text and "question 0 " not in text
    assert [span.message for span in fitted.prompt.spans] == [0, *range(fitted.first_kept, len(messages))]


def test_the_beginning_stays_put_until_it_must_move():
    """Dropping one turn per message moved the prompt's head every time, and nothing was reused any more."""
    messages, limit, first_kept, heads = chat(0), 700, None, []
    for turn in range(60):
        fitted = fit(messages, limit, reserve=50, first_kept=first_kept)
        first_kept = fitted.first_kept
        heads.append(first_kept)
        assert len(fitted.prompt.token_ids) + 50 <= limit
        messages = [*messages, ChatMessage("assistant", f"reply {turn}"), ChatMessage("user", f"and {turn}?")]
    moves = sum(1 for a, b in pairwise(heads) if a != b)
    assert 2 <= moves <= 60 // 3
    assert heads == sorted(heads)


def test_a_stored_beginning_that_still_fits_is_used_even_if_more_would_fit():
    messages = chat(6)
    fitted = fit(messages, 10_000, first_kept=5)
    assert fitted.first_kept == 5 and fitted.dropped == (1, 2, 3, 4)
    assert fit(messages, 10_000, first_kept=6).first_kept == 5
    assert fit(messages[:4], 10_000, first_kept=99).first_kept == 3


@pytest.mark.parametrize("reserve", [0, 511, 512, 10_000])
def test_a_reply_as_long_as_the_context_does_not_empty_the_prompt(reserve):
    """The prompt budget became 0, all messages left, and every question got the same greeting."""
    messages = chat(3, system="")
    for question in ("2+2?", "Capital of France?", "Name a fruit"):
        asked = [*messages[:-1], ChatMessage("user", question)]
        fitted = fit(asked, 512, reserve)
        assert question in TOKENIZER.decode(fitted.prompt.token_ids)
        assert "question 2" in TOKENIZER.decode(fitted.prompt.token_ids)
        assert effective_max_tokens(len(fitted.prompt.token_ids), 512, 512) == 512 - len(fitted.prompt.token_ids)


@pytest.mark.parametrize(
    "messages",
    [
        chat(2, system="s" * 250),
        [ChatMessage("user", "x" * 2000)],
        [ChatMessage("system", "s" * 250), ChatMessage("user", "hi")],
    ],
)
def test_no_room_for_one_token_names_both_numbers(messages):
    kept = [m for m in messages[:-1] if m.role == "system"] + [messages[-1]]
    with pytest.raises(ContextOverflow, match=rf"{tokens(kept)} tokens .* 256") as raised:
        fit(messages, 256, 64)
    assert raised.value.code == "context_length_exceeded" and raised.value.status == 400


def test_exactly_one_token_of_room_is_enough():
    messages = [ChatMessage("user", "hi")]
    count = tokens(messages)
    assert effective_max_tokens(len(fit(messages, count + 1, 64).prompt.token_ids), count + 1, None) == 1
    with pytest.raises(ContextOverflow):
        fit(messages, count, 64)


def test_a_reply_to_be_continued_stays_open():
    messages = [*chat(2), ChatMessage("assistant", "I was saying")]
    assert TOKENIZER.decode(fit(messages, 10_000).prompt.token_ids).endswith("assistant\nI was saying")


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    system=st.integers(0, 60),
    limit=st.integers(40, 900),
    reserve=st.integers(0, 900),
    first_kept=st.one_of(st.none(), st.integers(0, 30)),
)
def test_any_conversation_fits_or_is_refused(sizes, system, limit, reserve, first_kept):
    messages = [ChatMessage("system", "s" * system)] if system else []
    messages += [ChatMessage("user" if i % 2 == 0 else "assistant", "x" * n) for i, n in enumerate(sizes)]
    if messages[-1].role == "assistant":
        messages.append(ChatMessage("user", "q"))
    head = bool(system)
    try:
        fitted = fit(messages, limit, reserve, first_kept)
    except ContextOverflow:
        assert tokens([*messages[:head], messages[-1]]) >= limit
        return
    count = len(fitted.prompt.token_ids)
    assert effective_max_tokens(count, limit, None) >= 1
    assert fitted.dropped == tuple(range(head, fitted.first_kept))
    assert fitted.first_kept == head or messages[fitted.first_kept].role == "user"
    assert count == tokens([*messages[:head], *messages[fitted.first_kept :]])
    assert count + min(max(reserve, 1), limit // 2) <= limit or fitted.first_kept == len(messages) - 1
