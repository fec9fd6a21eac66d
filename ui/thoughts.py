"""What replies write in `<think>` marks before they answer: found in a text, and left out of a prompt."""

from __future__ import annotations

import re

from engine.protocol import ChatMessage
from engine.tokenizer import ChatTokenizer

OPEN, CLOSE = "<think>", "</think>"
LONE_CLOSE = re.compile(r"^</think>", re.MULTILINE)


def split_thinking(text: str) -> list[tuple[bool, bool, str]]:
    """`(is thinking, is closed, text)` of each part, in order.

    Some templates open the block in the prompt, so that a reply may begin inside it and only close it.
    """
    parts: list[tuple[bool, bool, str]] = []
    rest = text
    if OPEN not in text and (lone := LONE_CLOSE.search(text)):
        parts.append((True, True, text[: lone.start()]))
        rest = text[lone.end() :]
    while rest.lstrip().startswith(OPEN):
        inner = rest.lstrip()[len(OPEN) :]
        thought, mark, rest = inner.partition(CLOSE)
        parts.append((True, bool(mark), thought.lstrip("\n")))
    rest = rest.lstrip("\n")
    if rest.strip():
        parts.append((False, False, rest))
    return parts


def without_thoughts(message: ChatMessage, tokenizer: ChatTokenizer) -> ChatMessage:
    """A reply with its answer alone, which keeps the ids that the model gave it; any other message as it is.

    A thought that was cut off has no answer behind it, and stays.
    """
    parts = split_thinking(message.content) if message.role == "assistant" else []
    if not any(thinking for thinking, _, _ in parts) or any(thinking and not closed for thinking, closed, _ in parts):
        return message
    answer = "".join(text for thinking, _, text in parts if not thinking)
    ids = None if message.token_ids is None else tokenizer.part_of_reply(message.token_ids, answer)
    return ChatMessage(message.role, answer, ids)
