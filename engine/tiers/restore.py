"""Blocks and state that were kept back into the pools: whole or not at all, checked by computing positions anew."""

from __future__ import annotations

import torch

from engine.kv_cache.block_pool import NULL_BLOCK, OutOfBlocks
from engine.kv_cache.held import HeldBlocks
from engine.kv_cache.manifest import SnapshotRefused
from engine.kv_cache.origin import Origin
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.sequence_state import SequenceState
from engine.kv_cache.window import BlockPlace, Windows
from engine.model_runner import ModelRunner
from engine.models.decoder import DecoderModel
from engine.scheduler import ScheduledBatch, ScheduledItem, Scheduler
from engine.sequence import Sequence

AUDITED_BLOCKS, AUDITED_POSITIONS = 3, 2
FORMAT_TOLERANCE = {"fp32": 0.005, "fp16": 0.02, "bf16": 0.05, "int8": 0.1, "fp8": 0.2, "int4": 0.5}
COMPUTE_TOLERANCE = {torch.float32: 0.005, torch.float16: 0.05, torch.bfloat16: 0.1}
ACTIVATION_TOLERANCE = 0.15
"""Largest relative error (norm of the difference / norm, over a layer's K or V) of positions computed anew."""


def audit_tolerance(kv_format: str, model: DecoderModel) -> float:
    """What rounding may do: of the cache, and of a step that takes another number of tokens at once."""
    activations = ACTIVATION_TOLERANCE if model.amplifies_rounding else 0.0
    return max(FORMAT_TOLERANCE[kv_format], COMPUTE_TOLERANCE[model.dtype], activations)


def audit_blocks(windows: Windows) -> int:
    """Blocks that the audit of what is restored needs for a moment."""
    return AUDITED_BLOCKS * len(windows.groups)


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
    ) -> tuple[Sequence, set[BlockPlace]]:
        """The session's sequence, idle, with all its blocks, and which are shared: those that the tree had.

        Without a session the tree alone keeps the full blocks. `displacing`: idle sessions may lose their blocks for
        it. Nothing live changes before all is checked. Raises `NoRoom`, and `SnapshotRefused` where `audit` finds other
        values than the model computes, or K and V come without the recurrent state that belongs to them.
        """
        self.compared = []
        self._check_whole(held)
        sequence = Sequence(self._cache, session_id)
        sequence.set_tokens(held.token_ids)
        shared = self._share(sequence, held)
        own = [row for row, place in enumerate(held.places) if place not in shared]
        try:
            if sequence.state is not None and (sequence.state.held is None or (audit and own)):
                self._room_for_state(displacing)  # the audit, too, needs a slot for a moment
            if own:
                self._copy_in(sequence, held, own, displacing)
                if audit:
                    self._audit(sequence, [held.places[row] for row in own], held.cache_pos)
            if sequence.state is not None and sequence.state.held is None:
                self._take_state(sequence.state, held, session_id)
        except BaseException:
            sequence.release_blocks()
            raise
        sequence.blocks.anchors = held.anchors
        sequence.advance(held.cache_pos, Origin.SNAPSHOT)
        for _, index in shared:
            start = index * self._cache.block_size
            sequence.origins[start : start + self._cache.block_size] = (
                bytearray([Origin.SHARED]) * self._cache.block_size
            )
        if session_id is not None:
            self._scheduler.idle.pop(session_id, None)
        self._scheduler.finish(sequence)
        return sequence, shared

    def _check_whole(self, held: HeldBlocks) -> None:
        """All that groups without a window, and the windows of the others, must have is there."""
        size, places = self._cache.block_size, set(held.places)
        windows = self._cache.windows
        if any(not (0 <= g < len(windows.groups) and 0 <= i * size < held.cache_pos) for g, i in places):
            raise SnapshotRefused("The snapshot has blocks of other groups of layers than the model.")
        if windows.resume_point(held.cache_pos, lambda group, index: (group, index) in places) != held.cache_pos:
            raise SnapshotRefused(f"The snapshot lacks blocks of its {held.cache_pos} tokens.")
        if (held.state is None) != (self._cache.checkpoints is None):
            raise SnapshotRefused("The snapshot lacks the recurrent state that belongs to its tokens.")

    def _share(self, sequence: Sequence, held: HeldBlocks) -> set[BlockPlace]:
        """Give the sequence those of the held blocks that the tree has, and its state; which they are.

        The tables reach as far as the held blocks do; `cache_pos` stays 0 until all are there.
        """
        path = self._cache.match(held.token_ids[: held.cache_pos])
        shared = {(g, i) for g, i in held.places if i < len(path) and path[i].block_ids[g] != NULL_BLOCK}
        count = -(-held.cache_pos // self._cache.block_size) if self._cache.holds_kv else 0
        for table in sequence.block_tables:
            table += [NULL_BLOCK] * count
        sequence.block_turns = [None] * count
        for group, index in shared:
            self._cache.pool.add_ref(path[index].block_ids[group])
            sequence.block_tables[group][index] = path[index].block_ids[group]
            sequence.block_turns[index] = path[index].turn_id
        if sequence.state is not None and sequence.state.resume(held.token_ids, held.cache_pos) < held.cache_pos:
            sequence.state.drop()
        return shared

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

    def _copy_in(self, sequence: Sequence, held: HeldBlocks, rows: list[int], displacing: bool) -> None:
        spare = len(rows) + audit_blocks(self._cache.windows)
        pool = self._cache.pool
        if not (self._scheduler.make_room(spare) if displacing else pool.free_count >= spare):
            raise NoRoom
        block_ids = []
        for row in rows:
            group, index = held.places[row]
            block_ids.append(self._cache.allocate())
            sequence.block_tables[group][index] = block_ids[-1]
            sequence.block_turns[index] = held.turns[row]
        self._runner.sync_blocks()
        try:
            with self._runner.threads_for(len(rows) * self._cache.block_size):
                self._runner.cache.import_blocks(block_ids, held.tensors, rows)
        except (ValueError, IndexError) as error:
            raise SnapshotRefused(f"The snapshot does not fit: {error}.") from error

    def _audit(self, sequence: Sequence, own: list[BlockPlace], cache_pos: int) -> None:
        """Run the last positions of three blocks again, into copies of them, and compare K and V of all layers.

        They are the first and the middle one of those that were copied in (`own`), and the last. Positions of the last
        attend to all that is visible to them, so that a fault elsewhere shows in their K and V as far as they attend to
        it. Where the window before a block is not held its positions can't be computed, so it is passed over.

        With recurrent layers a position can be computed only from the state before it, and that is known at the first
        token alone: the first block is computed, unless the tree had it. All else, and the state itself, is held
        against its digest when it is read, which tells damage but not values that were wrong when written.
        """
        indices = sorted({index for _, index in own})
        if sequence.state is not None:
            if indices[0] == 0:
                self._audit_beginning(sequence, cache_pos)
            return
        size, last = self._cache.block_size, (cache_pos - 1) // self._cache.block_size
        chosen = sorted({indices[0], indices[len(indices) // 2], last})
        ends = [min((index + 1) * size, cache_pos) for index in chosen]
        samples: list[ScheduledItem] = []
        try:
            for end in ends:
                if sequence.blocks.held_point(end) == end:
                    samples.append(self._sample(sequence, end))
            self._runner.execute(ScheduledBatch(tuple(samples)), (), ())
            for item in samples:
                self._compare(sequence, item)
        except OutOfBlocks as error:
            raise NoRoom from error
        finally:
            for item in samples:
                for table in item.sequence.block_tables:
                    self._cache.pool.release(table[-1])

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
        """The last positions before `end`, with copies of their block at the end of the tables."""
        index = (end - 1) // self._cache.block_size
        start = max(index * self._cache.block_size, end - AUDITED_POSITIONS)
        while start < end - 1 and sequence.blocks.held_point(start) < start:
            start += 1
        again = Sequence(self._cache)
        again.set_tokens(sequence.token_ids[:end])
        for table, copy, scratch in zip(sequence.block_tables, again.block_tables, self._allocate(), strict=True):
            copy += [*table[:index], scratch]
        again.cache_pos = start
        self._runner.sync_blocks()
        pairs = zip(sequence.block_tables, again.block_tables, strict=True)
        self._runner.cache.copy_blocks([(live[index], copy[index]) for live, copy in pairs])
        return ScheduledItem(again, start, end - start, False)

    def _allocate(self) -> list[int]:
        """A block for each group, or none. Raises `OutOfBlocks`."""
        block_ids: list[int] = []
        try:
            for _ in self._cache.windows.groups:
                block_ids.append(self._cache.allocate())
        except OutOfBlocks:
            for block_id in block_ids:
                self._cache.pool.release(block_id)
            raise
        return block_ids

    def _compare(self, sequence: Sequence, item: ScheduledItem) -> None:
        worst = self._worst_error(sequence.block_tables, item.sequence.block_tables, item.start, item.count)
        self.compared.append((item.start, item.count, worst))
        if not worst <= self._tolerance:
            raise SnapshotRefused(
                f"The snapshot's positions {item.start} to {item.start + item.count - 1} differ from what the model"
                f" computes there, by {worst:.3g} of their size."
            )

    def _worst_error(self, stored: list[list[int]], computed: list[list[int]], start: int, count: int) -> float:
        """The largest relative error over K and V of the layers that have the block; NaN where a value is not
        finite."""
        cache, index = self._runner.cache, start // self._cache.block_size
        held = [layer for layer, place in enumerate(cache.places) if stored[place.group][index] != NULL_BLOCK]
        was = cache.read_tokens(stored, start, count)[:, held].flatten(2)
        now = cache.read_tokens(computed, start, count)[:, held].flatten(2)
        return float(((was - now).norm(dim=-1) / now.norm(dim=-1).clamp(min=1e-12)).max())
