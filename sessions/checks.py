"""Limits and forms of what may be stored, the same for a caller's values and for an imported file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from sessions.errors import InvalidData
from sessions.models import ROLES, STATUSES

MAX_TITLE = 200
"""Characters of a session's title."""
MAX_TEXT = 4_000_000
"""Characters of a message or system prompt."""
MAX_LABEL = 10_000
"""Characters of an error, a model's name or a finish reason."""
MAX_JSON = 1_000_000
"""Characters of settings or numbers as JSON."""
MAX_DEPTH = 32
"""Levels of nesting in settings or numbers: what is stored must be readable from any depth of calls."""
MAX_TOKENS = 4_000_000
MAX_TOKEN_ID = 2**31 - 1

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_uuid(value: object) -> bool:
    """True for a UUID as this program writes them: lower case, with hyphens."""
    return isinstance(value, str) and _UUID.fullmatch(value) is not None


def check_text(name: str, value: object, limit: int = MAX_TEXT) -> str:
    """The text as it can be stored: half characters (lone surrogates) become U+FFFD."""
    if not isinstance(value, str):
        raise InvalidData(f"{name} must be text.")
    if len(value) > limit:
        raise InvalidData(f"{name} has {len(value)} characters; at most {limit} can be stored.")
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def check_optional_text(name: str, value: object, limit: int = MAX_LABEL) -> str | None:
    return None if value is None else check_text(name, value, limit)


def check_title(value: object) -> str:
    """One line without surrounding blanks, not empty."""
    title = " ".join(check_text("The title", value, MAX_TITLE).split())
    if not title:
        raise InvalidData("The title is empty.")
    return title


def check_role(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in ROLES:
        raise InvalidData(f"{name} must be one of {', '.join(ROLES)}.")
    return value


def check_status(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in STATUSES:
        raise InvalidData(f"{name} must be one of {', '.join(STATUSES)}.")
    return value


def check_token_ids(name: str, value: Iterable[int] | None) -> tuple[int, ...] | None:
    """Ids as whole numbers from 0 to 2**31 - 1; None where the ids are not known."""
    if value is None:
        return None
    ids = tuple(value)
    if len(ids) > MAX_TOKENS:
        raise InvalidData(f"{name} holds {len(ids)} ids; at most {MAX_TOKENS} can be stored.")
    if not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in ids):
        raise InvalidData(f"{name} must be whole numbers from 0 to {MAX_TOKEN_ID}.")
    return ids


def check_json(name: str, value: object) -> str:
    """A dictionary as JSON text. Keys become text, tuples become lists; NaN and infinity are refused."""
    if not isinstance(value, Mapping):
        raise InvalidData(f"{name} must be an object.")
    if _deeper_than(value, MAX_DEPTH):
        raise InvalidData(f"{name} is nested more than {MAX_DEPTH} levels deep.")
    try:
        text = json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidData(f"{name} holds a value that JSON can't express.") from error
    if len(text) > MAX_JSON:
        raise InvalidData(f"{name} is too large: {len(text)} characters as JSON, at most {MAX_JSON} can be stored.")
    return text


def parse_json(text: str) -> dict[str, Any]:
    """The dictionary that `check_json` wrote."""
    value: dict[str, Any] = json.loads(text)
    return value


def _deeper_than(value: object, levels: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(_deeper_than(item, levels - 1) for item in value)
