"""A JSON object of an import, read field by field; what is wrong with one is told in a sentence that names it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sessions import checks
from sessions.errors import InvalidData

MAX_ENTRIES = 100_000
MAX_DATE = 40
"""Characters of an ISO date and time."""


class JsonRecord:
    """With the name that error sentences call it by. Every method raises `InvalidData`."""

    def __init__(self, name: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise InvalidData(f"{name} must be a JSON object.")
        self.name = name
        self._value = value

    def __contains__(self, key: str) -> bool:
        return key in self._value

    def label(self, key: str) -> str:
        return f'{self.name}: "{key}"'

    def get(self, key: str) -> Any:
        if key not in self._value:
            raise InvalidData(f'{self.name} has no "{key}".')
        return self._value[key]

    def uuid(self, key: str) -> str:
        value = self.get(key)
        if not checks.is_uuid(value):
            raise InvalidData(f"{self.label(key)} must be a UUID.")
        return str(value)

    def optional_uuid(self, key: str) -> str | None:
        return None if self.get(key) is None else self.uuid(key)

    def text(self, key: str, limit: int = checks.MAX_TEXT) -> str:
        return checks.check_text(self.label(key), self.get(key), limit)

    def optional_text(self, key: str) -> str | None:
        return checks.check_optional_text(self.label(key), self.get(key))

    def object(self, key: str) -> dict[str, Any]:
        return checks.parse_json(checks.check_json(self.label(key), self.get(key)))

    def time(self, key: str) -> datetime:
        try:
            return datetime.fromisoformat(self.text(key, MAX_DATE))
        except ValueError as error:
            raise InvalidData(f"{self.label(key)} must be an ISO date and time.") from error

    def utc(self, key: str) -> str:
        try:
            return self.time(key).astimezone(UTC).isoformat(timespec="microseconds")
        except (ValueError, OverflowError, OSError) as error:
            raise InvalidData(f"{self.label(key)} is out of range.") from error

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise InvalidData(f"{self.label(key)} must be a list or null.")
        return checks.check_token_ids(self.label(key), value)

    def whole(self, key: str, limit: int) -> int:
        value = self.get(key)
        if type(value) is not int or not 0 <= value <= limit:
            raise InvalidData(f"{self.label(key)} must be a whole number from 0 to {limit}.")
        return value

    def records(self, key: str, name: str) -> list[JsonRecord]:
        value = self.get(key)
        if not isinstance(value, list):
            raise InvalidData(f"{self.label(key)} must be a list.")
        if len(value) > MAX_ENTRIES:
            raise InvalidData(f"{self.label(key)} has {len(value)} entries; at most {MAX_ENTRIES} can be imported.")
        return [JsonRecord(f"{name} {number}", item) for number, item in enumerate(value, start=1)]
