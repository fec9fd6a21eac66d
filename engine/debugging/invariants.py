"""What must hold of every cache: looked at before and after each step, and from scratch when somebody asks.

The look at a step costs a few comparisons per sequence, whatever its length; only a block that was begun or filled in
this step is compared with the others, or with its ids.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.prefix_cache import PrefixCache
from engine.scheduler import ScheduledBatch, ScheduledItem
from engine.sequence import Sequence, Status

log = logging.getLogger("kvscope.invariants")
SESSIONS = 256


@dataclass(frozen=True, slots=True)
class Violation:
    """Which invariant broke first, and what was seen, as a sentence."""

    name: str
    sentence: str


class InvariantLights:
    """Of the sessions that ran last; only the engine thread uses it. `comparisons` counts the work."""

    def __init__(self, cache: PrefixCache) -> None:
        self.comparisons = 0
        self._cache = cache
        self._ends: dict[Sequence, int] = {}
        self._broken: dict[str, Violation] = {}

    def before(self, batch: ScheduledBatch) -> list[tuple[Sequence, Violation]]:
        """Look at what the scheduler wants to be written; what does not hold, the first of each sequence."""
        written: dict[int, Sequence] = {}
        found = [(item.sequence, self._before(item, written)) for item in batch.items]
        return self._kept(found)

    def after(self, batch: ScheduledBatch, finite: SequenceOf[bool]) -> list[tuple[Sequence, Violation]]:
        """Look at what the step left, once its tokens are in the sequences."""
        found = [(item.sequence, self._after(item, ok)) for item, ok in zip(batch.items, finite, strict=True)]
        self._ends = {
            item.sequence: item.start + item.count for item in batch.items if item.sequence.status is Status.RUNNING
        }
        return self._kept(found)

    def first(self, session_id: str | None) -> Violation | None:
        """What broke first in the session's last turn."""
        return self._broken.get(session_id or "")

    def begin(self, sequence: Sequence) -> None:
        """A turn of this sequence begins, perhaps at another position."""
        self._ends.pop(sequence, None)
        self._broken.pop(sequence.session_id or "", None)

    def forget(self, session_id: str) -> None:
        self._broken.pop(session_id, None)

    def _before(self, item: ScheduledItem, written: dict[int, Sequence]) -> Violation | None:
        sequence, start = item.sequence, item.start
        self.comparisons += 2
        if start != sequence.cache_pos:
            return Violation("next_position_is_length", f"The next token goes to position {start}, but "
                             f"{sequence.cache_pos} tokens are in the cache.")  # fmt: skip
        # A prefill may have been put back and begun anew; a token that follows the last one was not.
        end = self._ends.get(sequence, start) if item.known == 1 else start
        if start != end:
            return Violation("cache_length_is_tokens_run", f"The cache is said to hold {start} tokens, but {end} were "
                             "run.")  # fmt: skip
        found = (self._written(item, table, written) for table in sequence.block_tables)
        return next((violation for violation in found if violation is not None), None)

    def _written(self, item: ScheduledItem, table: list[int], written: dict[int, Sequence]) -> Violation | None:
        """Of the blocks of one group of layers that the next step writes."""
        size, sequence, start, count = self._cache.block_size, item.sequence, item.start, item.count
        for index in range(start // size, -(-(start + count) // size)):
            self.comparisons += 2
            if index >= len(table) or table[index] == NULL_BLOCK:
                return Violation("cache_pos_within_blocks", f"Position {index * size} has no block.")
            if self._cache.pool.ref_count(table[index]) != 1:
                owners = self._cache.pool.ref_count(table[index])
                return Violation("written_block_has_one_owner", f"Block {table[index]} is about to be written and has "
                                 f"{owners} owners.")  # fmt: skip
            if written.setdefault(table[index], sequence) is not sequence:
                return Violation("written_block_has_one_owner", f"Two sequences write block {table[index]}.")
        begun = -(-start // size) < -(-(start + count) // size)
        if begun or item.known > 1:
            self.comparisons += len(table)
            held = [block_id for block_id in table if block_id != NULL_BLOCK]
            if len(set(held)) != len(held):
                return Violation("no_position_twice", "A block stands twice in the block table, so two positions share "
                                 "a slot.")  # fmt: skip
        return None

    def _after(self, item: ScheduledItem, finite: bool) -> Violation | None:
        sequence, end, size = item.sequence, item.start + item.count, self._cache.block_size
        self.comparisons += 3
        if not finite:
            return Violation("values_finite", f"The step at position {item.start} made values that are not finite.")
        if sequence.status is not Status.RUNNING or sequence.cache_pos != end:
            return None  # the turn is over and settled, or beams have been exchanged
        if item.wants_logits and sequence.remaining > 1:
            return Violation(
                "last_token_run_or_pending", f"{sequence.remaining} tokens wait to be run where one should."
            )
        if end // size > item.start // size and self._cache.holds_kv:
            index = end // size - 1
            self.comparisons += size
            if index >= len(sequence.nodes) or sequence.nodes[index].key != _ids(sequence, index, size):
                return Violation(
                    "cached_ids_are_history", f"Block {index} is filed under other ids than the history has."
                )
        return None

    def _kept(self, found: list[tuple[Sequence, Violation | None]]) -> list[tuple[Sequence, Violation]]:
        broken = [(sequence, violation) for sequence, violation in found if violation is not None]
        for sequence, violation in broken:
            if self._broken.setdefault(sequence.session_id or "", violation) is violation:
                log.warning("Session %s: %s (%s)", sequence.session_id, violation.sentence, violation.name)
        while len(self._broken) > SESSIONS:
            self._broken.pop(next(iter(self._broken)))
        return broken


def invariants(cache: PrefixCache, lights: InvariantLights, sequence: Sequence, finite: bool = True) -> dict[str, bool]:
    """All invariants of a sequence between two steps, from scratch; false names a fault of the cache.

    `finite`: whether the values that were looked at are. What broke during the last turn stays false until the next.
    """
    size, tables, count = cache.block_size, sequence.block_tables, sequence.cache_pos
    blocks, last = list(sequence.blocks), [table[count // size] for table in tables if count % size]
    idle = sequence.status is Status.IDLE
    found = {
        "cache_length_is_tokens_run": 0 <= count <= len(sequence.token_ids),
        "cache_pos_within_blocks": all(count <= len(table) * size for table in tables),
        "windows_are_held": sequence.blocks.held_point(count) == count,
        "cached_ids_are_history": count <= len(sequence.token_ids)
        and (not cache.holds_kv or len(sequence.nodes) == count // size)
        and all(node.key == _ids(sequence, index, size) for index, node in enumerate(sequence.nodes)),
        "next_position_is_length": not idle or sequence.remaining <= 1,
        "no_position_twice": len(set(blocks)) == len(blocks),
        "every_block_owned": all(cache.pool.ref_count(block_id) > 0 for block_id in blocks),
        "last_block_not_shared": all(cache.pool.ref_count(block_id) == 1 for block_id in last),
        "written_block_has_one_owner": all(
            cache.pool.ref_count(block_id) == 1 for table in tables for block_id in table[-(-count // size) :]
        ),
        "last_token_run_or_pending": not idle or sequence.remaining <= 1,
        "values_finite": finite,
    }
    if sequence.state is not None:
        found["state_is_that_of_cache_pos"] = sequence.state.is_at(sequence.token_ids[:count])
    broken = lights.first(sequence.session_id)
    if broken is not None:
        found[broken.name] = False
    return found


def _ids(sequence: Sequence, index: int, size: int) -> tuple[int, ...]:
    return tuple(sequence.token_ids[index * size : (index + 1) * size])
