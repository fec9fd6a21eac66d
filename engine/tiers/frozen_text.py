"""From a text to the ids that a chat with it as its system prompt begins with, and to the name they are kept under."""

from __future__ import annotations

import hashlib
import re
from datetime import datetime, timedelta
from pathlib import Path

from engine.errors import ConfigError, InvalidRequest
from engine.kv_cache.prefixes import common_prefix_len
from engine.prompt import ConversationRenderer
from engine.protocol import ChatMessage

MOST_TEXT_BYTES = 8 << 20
FIRST_MESSAGES = ("a", "Zebra", "7", "\n(", "世界")
"""They share no beginning, also where a token takes the end of what stands before the message along."""


def check_text(text: str) -> None:
    """Raises `InvalidRequest` for a text that can't be a system prompt."""
    if not text.strip():
        raise InvalidRequest("The text to freeze is empty.")
    if re.search(r"[\ud800-\udfff]", text):
        raise InvalidRequest("The text to freeze holds half a character.")
    if len(text) > MOST_TEXT_BYTES:
        raise InvalidRequest(f"The text to freeze is too long; the most is {MOST_TEXT_BYTES >> 20} MiB.")


def read_text(path: Path) -> str:
    """A text file, in UTF-8 and with line feeds. Raises `ConfigError` and `InvalidRequest`."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"The file {path} can't be read: {error.strerror}.") from error
    if len(data) > MOST_TEXT_BYTES:
        raise ConfigError(f"The file {path} is too long; the most is {MOST_TEXT_BYTES >> 20} MiB.")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"The file {path} is not text in UTF-8.") from error
    check_text(text)
    return text


def prefix_ids(tokenizer: ConversationRenderer, text: str) -> tuple[int, ...]:
    """What all first prompts of chats with this system prompt begin with, up to where the user's message does.

    Raises `InvalidRequest` where that changes from day to day: it could be used on one day only.
    """
    system, today = ChatMessage("system", text), datetime.now()
    days = (today, today + timedelta(days=1), today + timedelta(days=400))

    def render(message: str, day: datetime) -> tuple[int, ...]:
        return tokenizer.render((system, ChatMessage("user", message)), day).token_ids

    first, *others = (render(message, today) for message in FIRST_MESSAGES)
    ids = first[: min(common_prefix_len(first, other) for other in others)]
    if any(common_prefix_len(ids, render(FIRST_MESSAGES[0], day)) < len(ids) for day in days[1:]):
        raise InvalidRequest(
            "This model's chat template puts the date before the first message, so what is frozen today would fit no "
            "chat of tomorrow; the bundled templates (--chat-template) have no date."
        )
    return ids


def name_of(text: str, title: str) -> str:
    """Lower-case words of the title, and a digest of the text: equal for equal texts of one title."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower())[:32].strip("-")
    return f"{words or 'text'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
