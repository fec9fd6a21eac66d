"""What a message may be, wherever it comes from."""

from __future__ import annotations

from engine.errors import InvalidRequest

MAX_MESSAGE_CHARS = 100_000


def check_content(content: str) -> None:
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest("The message is empty.")
    check_length(content)


def check_length(content: str) -> None:
    if len(content) >= MAX_MESSAGE_CHARS:
        raise InvalidRequest(f"The message has {len(content)} characters; the most is {MAX_MESSAGE_CHARS - 1}.")
