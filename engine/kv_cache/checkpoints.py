"""Recurrent states that were kept: which prefix each belongs to and which slot holds it. Ids only, no tensors.

A recurrent state can't be cut back like K and V, so it is kept where a conversation is likely to be taken up again: at
the ends of prompts and replies, and where a prompt parts from earlier ones, as behind a system prompt that chats share.
A checkpoint is never written again; a sequence that goes on from it copies it first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks
from engine.kv_cache.prefixes import common_prefix_len

CLEARED = NULL_BLOCK
"""As the source of a pending copy: the state before the first token."""


@dataclass(eq=False, slots=True)
class Checkpoint:
    """The state after `token_ids`, in `slot`."""

    token_ids: tuple[int, ...]
    slot: int
    session_id: str | None = None
    last_used: int = 0

    @property
    def position(self) -> int:
        return len(self.token_ids)


class StateCheckpoints:
    """Checkpoints by prefix. `slots` counts owners: one for this index, one for each sequence that holds a checkpoint.

    A checkpoint that no sequence holds may be evicted, the least recently used first, whenever a slot is wanted; so
    their number is bounded by the bytes that the pool of slots has. `slots.pending_copies` are copies of whole states.
    """

    def __init__(self, slots: BlockPool) -> None:
        self.slots = slots
        self._by_prefix: dict[tuple[int, ...], Checkpoint] = {}
        self._clock = 0

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._by_prefix.values())

    def newest(self, token_ids: Sequence[int], limit: int) -> Checkpoint | None:
        """The longest prefix of the first `limit` ids whose state was kept."""
        return next(self.along(token_ids, limit), None)

    def along(self, token_ids: Sequence[int], limit: int) -> Iterator[Checkpoint]:
        """All prefixes of the first `limit` ids whose state was kept, the longest first."""
        wanted = tuple(token_ids[:limit])
        candidates = [kept for kept in self if kept.position <= len(wanted)]
        candidates.sort(key=lambda kept: kept.position, reverse=True)
        for kept in candidates:
            if kept.token_ids[-1] == wanted[kept.position - 1] and kept.token_ids == wanted[: kept.position]:
                yield kept

    def parting(self, token_ids: Sequence[int]) -> int:
        """How many leading ids are equal to those of some checkpoint."""
        wanted = tuple(token_ids)
        return max((common_prefix_len(kept.token_ids, wanted) for kept in self), default=0)

    def add(self, token_ids: Sequence[int], slot: int, session_id: str | None) -> Checkpoint:
        """Keep the state in `slot`, whose owner the index becomes. If the prefix has one already, that one stays."""
        key = tuple(token_ids)
        kept = self._by_prefix.get(key)
        if kept is None:
            kept = self._by_prefix[key] = Checkpoint(key, slot, session_id)
        else:
            self.slots.release(slot)
        self.touch(kept)
        return kept

    def knows(self, token_ids: Sequence[int]) -> bool:
        return tuple(token_ids) in self._by_prefix

    def lists(self, kept: Checkpoint) -> bool:
        """Whether it is in the index, not merely held by sequences."""
        return self._by_prefix.get(kept.token_ids) is kept

    def touch(self, kept: Checkpoint) -> None:
        self._clock += 1
        kept.last_used = self._clock

    def allocate(self) -> int:
        """A slot with arbitrary content and one owner, evicting if none is free. Raises `OutOfBlocks`."""
        if not self.slots.free_count and not self.evict(1):
            raise OutOfBlocks
        return self.slots.allocate()

    def evict(self, count: int) -> int:
        """Free up to `count` slots of checkpoints that nobody holds; returns how many were freed."""
        unheld = sorted((kept for kept in self if not self.is_held(kept)), key=lambda kept: kept.last_used)
        for kept in unheld[:count]:
            self.remove(kept)
        return len(unheld[:count])

    def forget(self, session_id: str) -> None:
        """Remove what this session left behind (its chat was deleted)."""
        for kept in list(self):
            if kept.session_id == session_id and not self.is_held(kept):
                self.remove(kept)

    def is_held(self, kept: Checkpoint) -> bool:
        return self.slots.ref_count(kept.slot) > 1

    def remove(self, kept: Checkpoint) -> None:
        """Out of the index; the slot is free once no sequence holds it."""
        del self._by_prefix[kept.token_ids]
        self.slots.release(kept.slot)
