"""Which part of a reply is thought, and what is left of it in a later prompt."""

from __future__ import annotations

import pytest

from engine.protocol import ChatMessage
from tests.support.tiny_tokenizer import chat_tokenizer
from ui.thoughts import without_thoughts

WHOLE = (
    ("<think>\nhm\n</think>\n\nParis is.", "Paris is."),
    ("\n<think>hm</think><think>hm\nhm</think>Paris is.\n", "Paris is.\n"),
    ("hm, France\n</think>\n\nParis is.", "Paris is."),
    ("<think>hm</think>", ""),
)
KEPT = ("Paris is.", "<think>hm, cut off", "<think>hm</think><think>cut", "Write <think> or </think> like this.", "")


@pytest.mark.parametrize(("text", "answer"), WHOLE)
def test_the_answer_is_left_with_its_own_ids(text: str, answer: str) -> None:
    tokenizer = chat_tokenizer()
    ids = tuple(tokenizer.encode(text))
    left = without_thoughts(ChatMessage("assistant", text, ids), tokenizer)
    assert left.content == answer and tokenizer.decode(left.token_ids or ()) == answer
    assert tuple(left.token_ids or ()) == ids[len(ids) - len(left.token_ids or ()) :]
    assert without_thoughts(ChatMessage("assistant", text, None), tokenizer) == ChatMessage("assistant", answer, None)


@pytest.mark.parametrize("text", KEPT)
def test_what_has_no_whole_thought_stays(text: str) -> None:
    message = ChatMessage("assistant", text, None)
    assert without_thoughts(message, chat_tokenizer()) is message


def test_only_replies_have_thoughts() -> None:
    message = ChatMessage("user", WHOLE[0][0])
    assert without_thoughts(message, chat_tokenizer()) is message
