"""The recurrent state of one sequence: a slot of its own while it runs, a checkpoint while it does not."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv_cache.block_pool import OutOfBlocks
from engine.kv_cache.checkpoints import CLEARED, Checkpoint, StateCheckpoints

WORTH_KEEPING = 4
"""Blocks that a checkpoint where prompts part must save computing."""


class SequenceState:
    """`live` is the slot that steps move on. Without one, `held` is the state that the sequence goes on from; None:
    from the first token. `wanted` are the positions at which a prefill stops, so that checkpoints can be taken."""

    def __init__(self, checkpoints: StateCheckpoints) -> None:
        self.live: int | None = None
        self.held: Checkpoint | None = None
        self.wanted: tuple[int, ...] = ()
        self._checkpoints = checkpoints

    def resume_point(self, token_ids: Sequence[int], count: int, cache_pos: int) -> int:
        """The last position up to `count` from which the sequence, now at `cache_pos`, could go on."""
        if count == cache_pos and (self.live is not None or self.held is not None):
            return count
        kept = self._checkpoints.newest(token_ids, count)
        return 0 if kept is None else kept.position

    def is_at(self, token_ids: Sequence[int]) -> bool:
        """Whether what is had is the state after `token_ids`; of a live state its owner says so."""
        if self.live is not None or not token_ids:
            return self.held is None
        return self.held is not None and self.held.token_ids == tuple(token_ids)

    def cut(self, token_ids: Sequence[int], count: int, cache_pos: int) -> int:
        """Go back to `resume_point`, which is returned; a live state that is past it is given up."""
        if count == cache_pos and (self.live is not None or self.held is not None):
            return count
        return self.resume(token_ids, count)

    def resume(self, token_ids: Sequence[int], limit: int) -> int:
        """Hold the newest checkpoint of the first `limit` ids; its position, 0 if there is none."""
        self.hold(self._checkpoints.newest(token_ids, limit))
        return 0 if self.held is None else self.held.position

    def checkpoints(self, token_ids: Sequence[int]) -> list[int]:
        """Positions within `token_ids` whose state was kept, in order."""
        return sorted(kept.position for kept in self._checkpoints.along(token_ids, len(token_ids)))

    def hold(self, kept: Checkpoint | None) -> None:
        """Go on from `kept`, or from the first token, and from nothing else."""
        if kept is not None:
            self._checkpoints.slots.add_ref(kept.slot)
            self._checkpoints.touch(kept)
        self.drop()
        self.held = kept

    def begin(self, token_ids: Sequence[int], cache_pos: int, block_size: int) -> None:
        """Have a live state, a copy of the one held, for the ids from `cache_pos` on. Raises `OutOfBlocks`.

        Checkpoints are wanted at the last block boundary before the last id, and at the one where the ids part from
        earlier ones if that is some way off.
        """
        if self.live is not None:
            return
        end = (len(token_ids) - 1) // block_size
        parting = min(self._checkpoints.parting(token_ids) // block_size, end)
        far = parting * block_size - cache_pos >= WORTH_KEEPING * block_size
        wanted = {parting * block_size, end * block_size} if far else {end * block_size}
        slots = self._checkpoints.slots
        try:
            live = self._checkpoints.allocate()
        except OutOfBlocks:
            listed = self.held is not None and self._checkpoints.lists(self.held)
            if self.held is None or slots.ref_count(self.held.slot) > 1 + listed:
                raise
            # Nobody else holds it and there is no room for a copy: go on in its own slot.
            if listed:
                self._checkpoints.remove(self.held)
            self.live, self.held = self.held.slot, None
        else:
            slots.pending_copies.append((CLEARED if self.held is None else self.held.slot, live))
            self.drop()
            self.live = live
        self.wanted = tuple(wanted)

    def save(self, token_ids: Sequence[int], session_id: str | None) -> None:
        """Keep a copy of the live state, which is that after `token_ids`, if a slot can be had."""
        if self.live is None or not token_ids or self._checkpoints.knows(token_ids):
            return
        try:
            slot = self._checkpoints.allocate()
        except OutOfBlocks:
            return
        self._checkpoints.slots.pending_copies.append((self.live, slot))
        self._checkpoints.add(token_ids, slot, session_id)

    def park(self, token_ids: Sequence[int], session_id: str | None, private: bool = False) -> None:
        """The turn is over: the live state, that after `token_ids`, turns into a checkpoint; a `private` one is of no
        use to anybody else."""
        if self.live is None:
            return
        if not token_ids:
            self.drop()
            return
        if private:
            self.held = Checkpoint(tuple(token_ids), self.live, session_id)
            self.live = None
            return
        self._checkpoints.slots.add_ref(self.live)
        self.hold(self._checkpoints.add(token_ids, self.live, session_id))

    def drop(self) -> None:
        """Give up whatever is had."""
        if self.live is not None:
            self._checkpoints.slots.release(self.live)
        if self.held is not None:
            self._checkpoints.slots.release(self.held.slot)
        self.live = self.held = None
