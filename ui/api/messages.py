"""Messages and prompts as OpenAI's clients send them."""

from __future__ import annotations

from typing import Any

from engine.errors import InvalidRequest
from engine.protocol import ChatMessage

ROLES = ("system", "developer", "user", "assistant")
"""No "tool": such a message answers a call of the model's, and none is made or read here."""
TOOL_ROLES = ("tool", "function")
PART_SEPARATOR = "\n"
"""What stands between the parts of a content that is a list: the parts "A" and "B" mean the text "A\nB"."""


def parse_messages(value: Any) -> list[ChatMessage]:
    """Role and text of each message; other fields are ignored. Raises `InvalidRequest`."""
    if not isinstance(value, list):
        raise InvalidRequest("messages must be a list of messages.")
    if not value:
        raise InvalidRequest("messages is empty.")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def parse_prompt(value: Any) -> str | tuple[int, ...]:
    """A text, or a list of token ids; a list that holds one of these counts as it. Raises `InvalidRequest`."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        raise InvalidRequest("One request takes one prompt; send several requests for several prompts.")
    return parse_token_ids("prompt", value)


def parse_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        kinds = "text or a list of token ids" if name == "prompt" else "a list of token ids"
        raise InvalidRequest(f"{name} must be {kinds}.")
    return tuple(value)


def check_token_range(token_ids: tuple[int, ...], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise InvalidRequest(f"Token ids must lie between 0 and {vocab_size - 1}.")


def _message(value: Any, place: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place} must be an object with role and content.")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = f"{place}.role must be one of {', '.join(ROLES)}"
        raise InvalidRequest(f"{known}; tools are not supported." if role in TOOL_ROLES else f"{known}.")
    if "content" not in value and role != "assistant":
        raise InvalidRequest(f"{place}.content is missing.")
    # "developer" is the newer name of the same thing, and stored sessions know only one.
    return ChatMessage("system" if role == "developer" else role, _text(value.get("content"), f"{place}.content"))


def _text(value: Any, place: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{place} must be text, null or a list of text parts.")
    return PART_SEPARATOR.join(_part(part, f"{place}[{index}]") for index, part in enumerate(value))


def _part(value: Any, place: str) -> str:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place} must be an object with type and text.")
    if value.get("type") != "text":
        raise InvalidRequest(f"{place} is not text; this model reads text only.")
    if not isinstance(value.get("text"), str):
        raise InvalidRequest(f"{place}.text must be text.")
    return str(value["text"])
