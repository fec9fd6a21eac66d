"""Blocks of idle sessions in RAM, when the pool has no room for them."""

from __future__ import annotations

from collections import OrderedDict

from engine.kv_cache.held import HeldBlocks


class HostTier:
    """At most `limit` bytes; what was put in first goes first. Only the engine thread uses it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: OrderedDict[str, HeldBlocks] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())

    def find(self, session_id: str) -> HeldBlocks | None:
        return self._held.get(session_id)

    def sizes(self) -> dict[str, int]:
        """Bytes by session."""
        return {session_id: held.nbytes for session_id, held in self._held.items()}

    def put(self, session_id: str, held: HeldBlocks) -> list[str]:
        """Take a session's blocks; the sessions whose blocks had to go, itself among them if it alone is too large."""
        self._held.pop(session_id, None)
        self._held[session_id] = held
        gone = []
        while self.nbytes > self.limit:
            gone.append(self._held.popitem(last=False)[0])
        return gone

    def remove(self, session_id: str) -> None:
        self._held.pop(session_id, None)
