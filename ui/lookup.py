"""Stored sessions and messages as a caller names them: found, or a sentence that says why not."""

from __future__ import annotations

import uuid

from engine.errors import InvalidRequest, NotFound
from sessions.errors import NotStored
from sessions.models import Message, Session
from sessions.store import SessionStore


class Lookup:
    """Raises `NotFound`, and `InvalidRequest` for what can't be meant. Thread-safe."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    def session(self, session_id: str) -> Session:
        try:
            uuid.UUID(session_id)
        except (ValueError, AttributeError, TypeError):
            raise InvalidRequest("A session id must be a UUID.") from None
        try:
            return self._store.get(session_id)
        except NotStored:
            raise NotFound("There is no session with this id.") from None

    def message(self, session_id: str, message_id: str) -> Message:
        try:
            message = self._store.message(message_id)
        except NotStored:
            message = None
        if message is None or message.session_id != session_id:
            raise NotFound("There is no message with this id in this session.")
        return message

    def path_to(self, session_id: str, message_id: str | None) -> list[Message]:
        """The messages from the first one down to this one; none for None."""
        path: list[Message] = []
        while message_id is not None:
            message = self.message(session_id, message_id)
            path.append(message)
            message_id = message.parent_id
        return path[::-1]

    def user_message_of(self, session_id: str, message_id: str | None) -> Message:
        """The user message itself, or the one that a reply answers."""
        while message_id is not None:
            message = self.message(session_id, message_id)
            if message.role == "user":
                return message
            message_id = message.parent_id
        raise InvalidRequest("There is no user message to answer.")
