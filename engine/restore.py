"""Blocks and state that were kept back into the pools: whole or not at all, checked by computing positions anew."""

from __future__ import annotations

import torch

from engine.kv_cache.block_pool import OutOfBlocks
from engine.kv_cache.held import HeldBlocks
from engine.kv_cache.manifest import SnapshotRefused
from engine.kv_cache.origin import Origin
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.sequence_state import SequenceState
from engine.model_runner import ModelRunner
from engine.scheduler import ScheduledBatch, ScheduledItem, Scheduler
from engine.sequence import Sequence

AUDITED_BLOCKS, AUDITED_POSITIONS = 3, 2
FORMAT_TOLERANCE = {"fp32": 0.005, "fp16": 0.02, "bf16": 0.05, "int8": 0.1, "fp8": 0.2, "int4": 0.5}
COMPUTE_TOLERANCE = {torch.float32: 0.005, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Largest relative error (norm of the difference / norm, over a layer's K or V) of positions computed anew."""


def audit_tolerance(kv_format: str, compute_dtype: torch.dtype) -> float:
    """What rounding may do: of the cache, and of a step that takes another number of tokens at once."""
    return max(FORMAT_TOLERANCE[kv_format], COMPUTE_TOLERANCE[compute_dtype])


class NoRoom(Exception):
    """The pool can't take the blocks now."""


class Restorer:
    """Puts held blocks into the pool. Only the engine thread uses it."""

    def __init__(self, cache: PrefixCache, scheduler: Scheduler, runner: ModelRunner, tolerance: float) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._runner = runner
        self._tolerance = tolerance
        self.compared: list[tuple[int, int, float]] = []
        """Of the last `restore`: first position, count and error of what was computed anew."""

    @property
    def tolerance(self) -> float:
        """The largest error that passes."""
        return self._tolerance

    def restore(
        self, session_id: str | None, held: HeldBlocks, *, displacing: bool, audit: bool
    ) -> tuple[Sequence, int]:
        """The session's sequence, idle, with all its blocks, and how many are shared: those that the tree had.

        Without a session the tree alone keeps the full blocks. `displacing`: idle sessions may lose their blocks for
        it. Nothing live changes before all is checked. Raises `NoRoom`, and `SnapshotRefused` where `audit` finds other
        values than the model computes, or K and V come without the recurrent state that belongs to them.
        """
        self.compared = []
        self._check_whole(held)
        sequence = self._shared_part(session_id, held)
        shared = len(sequence.block_table)
        try:
            if sequence.state is not None and (sequence.state.held is None or (audit and shared < len(held.turns))):
                self._room_for_state(displacing)  # the audit, too, needs a slot for a moment
            if self._cache.holds_kv:
                self._copy_in(sequence, held, displacing)
            if audit and len(sequence.block_table) > shared:
                self._audit(sequence, shared, held.cache_pos)
            if sequence.state is not None and sequence.state.held is None:
                self._take_state(sequence.state, held, session_id)
        except BaseException:
            sequence.release_blocks()
            raise
        sequence.advance(held.cache_pos - sequence.cache_pos, Origin.SNAPSHOT)
        if session_id is not None:
            self._scheduler.idle.pop(session_id, None)
        self._scheduler.finish(sequence)
        return sequence, shared

    def _check_whole(self, held: HeldBlocks) -> None:
        wanted = -(-held.cache_pos // self._cache.block_size) if self._cache.holds_kv else 0
        if len(held.turns) != wanted:
            raise SnapshotRefused(f"The snapshot has {len(held.turns)} blocks in place of {wanted}.")
        if (held.state is None) != (self._cache.checkpoints is None):
            raise SnapshotRefused("The snapshot lacks the recurrent state that belongs to its tokens.")

    def _shared_part(self, session_id: str | None, held: HeldBlocks) -> Sequence:
        path = self._cache.match(held.token_ids[: held.cache_pos])
        sequence = Sequence(self._cache, session_id)
        for node in path:
            self._cache.pool.add_ref(node.block_id)
        sequence.set_tokens(held.token_ids)
        sequence.block_table = [node.block_id for node in path]
        sequence.block_turns = [node.turn_id for node in path]
        sequence.nodes = path
        sequence.cache_pos = len(path) * self._cache.block_size
        sequence.origins = bytearray([Origin.SHARED]) * sequence.cache_pos
        if sequence.state is not None and sequence.state.resume(held.token_ids, held.cache_pos) < held.cache_pos:
            sequence.state.drop()
        return sequence

    def _room_for_state(self, displacing: bool) -> None:
        checkpoints = self._cache.checkpoints
        assert checkpoints is not None
        if not (self._scheduler.make_room_for_state() if displacing else checkpoints.slots.free_count):
            raise NoRoom

    def _take_state(self, state: SequenceState, held: HeldBlocks, session_id: str | None) -> None:
        """Hold the state at `cache_pos` as a checkpoint, which others may go on from too."""
        checkpoints, states = self._cache.checkpoints, self._runner.states
        assert checkpoints is not None and states is not None and held.state is not None
        slot = checkpoints.allocate()
        self._runner.sync_blocks()  # copies that are due may read what the slot held before
        try:
            states.import_state(slot, held.state)
        except ValueError as error:
            checkpoints.slots.release(slot)
            raise SnapshotRefused(f"The snapshot's recurrent state does not fit: {error}.") from error
        state.hold(checkpoints.add(held.token_ids[: held.cache_pos], slot, session_id))

    def _copy_in(self, sequence: Sequence, held: HeldBlocks, displacing: bool) -> None:
        first = len(sequence.block_table)
        count = len(held.turns) - first
        spare = count + AUDITED_BLOCKS
        pool = self._cache.pool
        if not (self._scheduler.make_room(spare) if displacing else pool.free_count >= spare):
            raise NoRoom
        for index in range(first, len(held.turns)):
            sequence.block_table.append(self._cache.allocate())
            sequence.block_turns.append(held.turns[index])
        self._runner.sync_blocks()
        try:
            rows = {name: tensor[first:] for name, tensor in held.tensors.items()}
            self._runner.cache.import_blocks(sequence.block_table[first:], rows)
        except ValueError as error:
            raise SnapshotRefused(f"The snapshot does not fit: {error}.") from error

    def _audit(self, sequence: Sequence, first: int, cache_pos: int) -> None:
        """Run the last positions of three blocks again, into copies of them, and compare K and V of all layers.

        They are the first and the middle one that were copied in, and the last. Positions of the last attend to the
        whole prefix, so that a fault elsewhere shows in their K and V as far as they attend to it.

        With recurrent layers a position can be computed only from the state before it, and that is known at the first
        token alone: the first block is computed, unless the tree had it. All else, and the state itself, is held
        against its digest when it is read, which tells damage but not values that were wrong when written.
        """
        if sequence.state is not None:
            if not first:
                self._audit_beginning(sequence, cache_pos)
            return
        size, last = self._cache.block_size, len(sequence.block_table) - 1
        ends = [min((index + 1) * size, cache_pos) for index in sorted({first, (first + last) // 2, last})]
        samples: list[ScheduledItem] = []
        try:
            for end in ends:
                samples.append(self._sample(sequence, end))
            self._runner.execute(ScheduledBatch(tuple(samples)), (), ())
            for item in samples:
                self._compare(sequence, item)
        except OutOfBlocks as error:
            raise NoRoom from error
        finally:
            for item in samples:
                self._cache.pool.release(item.sequence.block_table[-1])

    def _audit_beginning(self, sequence: Sequence, cache_pos: int) -> None:
        """Run the first block's positions again, from the state before the first token, into a block of their own."""
        count = min(self._cache.block_size, cache_pos)
        again = Sequence(self._cache)
        again.set_tokens(sequence.token_ids[:count])
        item = ScheduledItem(again, 0, count, False)
        try:
            again.reserve(count)
            self._runner.execute(ScheduledBatch((item,)), (), ())
            self._compare(sequence, item)
        except OutOfBlocks as error:
            raise NoRoom from error
        finally:
            again.release_blocks()

    def _sample(self, sequence: Sequence, end: int) -> ScheduledItem:
        """The last positions before `end`, with a copy of their block at the end of the table."""
        index = (end - 1) // self._cache.block_size
        start = max(index * self._cache.block_size, end - AUDITED_POSITIONS)
        scratch = self._cache.allocate()
        self._runner.sync_blocks()
        self._runner.cache.copy_blocks([(sequence.block_table[index], scratch)])
        again = Sequence(self._cache)
        again.set_tokens(sequence.token_ids[:end])
        again.block_table, again.cache_pos = [*sequence.block_table[:index], scratch], start
        return ScheduledItem(again, start, end - start, False)

    def _compare(self, sequence: Sequence, item: ScheduledItem) -> None:
        worst = self._worst_error(sequence.block_table, item.sequence.block_table, item.start, item.count)
        self.compared.append((item.start, item.count, worst))
        if not worst <= self._tolerance:
            raise SnapshotRefused(
                f"The snapshot's positions {item.start} to {item.start + item.count - 1} differ from what the model"
                f" computes there, by {worst:.3g} of their size."
            )

    def _worst_error(self, stored: list[int], computed: list[int], start: int, count: int) -> float:
        """The largest relative error over layers, K and V; NaN where a value is not finite."""
        was = self._runner.cache.read_tokens(stored, start, count).flatten(2)
        now = self._runner.cache.read_tokens(computed, start, count).flatten(2)
        return float(((was - now).norm(dim=-1) / now.norm(dim=-1).clamp(min=1e-12)).max())
