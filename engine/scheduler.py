"""Which sequences run in the next step, and with how many tokens. Integers and lists only."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.kv_cache.block_pool import OutOfBlocks
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.prefixes import common_prefix_len
from engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class ScheduledItem:
    """Tokens `start : start + count` of a sequence; `wants_logits` if they reach its last known token.

    `drafts` are guesses of what follows the last known token: the last of the `count`, run to see if they come true.
    """

    sequence: Sequence
    start: int
    count: int
    wants_logits: bool
    drafts: tuple[int, ...] = ()

    @property
    def known(self) -> int:
        """Tokens without the drafts."""
        return self.count - len(self.drafts)

    @property
    def row_count(self) -> int:
        """Rows of logits of an item that wants some: a draft is held against those of the token before it."""
        return 1 + len(self.drafts)

    def cut(self, count: int) -> ScheduledItem:
        """The first `count` tokens of an item with drafts."""
        return replace(self, count=count, drafts=self.drafts[: count - self.known])

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.token_ids[self.start : self.start + self.known], *self.drafts]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    items: tuple[ScheduledItem, ...]

    @property
    def token_count(self) -> int:
        return sum(item.count for item in self.items)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_batch_tokens` bounds a step (long prefills are cut into chunks of it); `mixed_batch_tokens` applies while
    others are decoding, so that a newcomer's prefill does not hold up their streams for long."""

    max_sequences: int = 16
    max_batch_tokens: int = 512
    mixed_batch_tokens: int = 128


class Scheduler:
    """Continuous batching: every running sequence decodes each step, what is left of the budget goes to prefills in
    order of arrival, and a newcomer joins at the next step. Sequences of finished turns stay in `idle` with their
    blocks until these are needed; then the longest idle gives its blocks up first, and `on_displace` is told before."""

    def __init__(self, cache: PrefixCache, limits: SchedulerLimits) -> None:
        self.on_displace: Callable[[Sequence], None] = lambda sequence: None
        self.on_shortage: Callable[[], bool] = lambda: False
        """Asked when no idle session is left to take blocks from; true if the pool may use more now."""
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.idle: OrderedDict[str, Sequence] = OrderedDict()
        self._cache = cache

    def sequences(self) -> Iterator[Sequence]:
        yield from self.waiting
        yield from self.running
        yield from self.idle.values()

    def find(self, session_id: str) -> Sequence | None:
        return next((seq for seq in self.sequences() if seq.session_id == session_id), None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose `token_ids` end in at least one token that is not in the cache."""
        if sequence.session_id is not None:
            self.idle.pop(sequence.session_id, None)
        sequence.status = Status.WAITING
        self.waiting.append(sequence)

    def join(self, fork: Sequence) -> None:
        """A fork of a running sequence runs beside it; one that could not share all of its cache first catches up."""
        if fork.remaining == 1:
            fork.status = Status.RUNNING
            self.running.append(fork)
        else:
            fork.status = Status.WAITING
            self.waiting.appendleft(fork)

    def leave(self, sequence: Sequence) -> None:
        """Schedule the sequence no more; it keeps its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def finish(self, sequence: Sequence) -> None:
        """The turn is over: a session's sequence turns idle with its blocks, any other gives them back."""
        self.leave(sequence)
        sequence.places = 1
        sequence.park()
        sequence.touch()
        sequence.evicted_from = 0
        if sequence.session_id is None:
            sequence.release_blocks()
        else:
            sequence.status = Status.IDLE
            self.idle[sequence.session_id] = sequence

    def schedule(self) -> ScheduledBatch | None:
        """The next step; None if nothing can run. Blocks for its tokens are reserved."""
        items = self._decodes()
        decoding = bool(items)
        budget = self.limits.mixed_batch_tokens if decoding else self.limits.max_batch_tokens
        budget = max(budget - len(items), 1)
        items += self._prefills(budget, alone=not items)
        # A sequence whose blocks another one needed is no longer running.
        items = [item for item in items if item.sequence.status is Status.RUNNING]
        return ScheduledBatch(tuple(items)) if items else None

    def _decodes(self) -> list[ScheduledItem]:
        items = []
        for sequence in [seq for seq in self.running if seq.remaining == 1]:
            if sequence.status is Status.RUNNING and self._reserve(sequence, len(sequence.token_ids)):
                items.append(self._item(sequence, 1))
        return [item for item in items if item.sequence.status is Status.RUNNING]

    def _prefills(self, budget: int, alone: bool) -> list[ScheduledItem]:
        """`alone`: nothing else runs in this step, so that one of them must."""
        items: list[ScheduledItem] = []
        if self.waiting and self._cache.windows.any:
            # Before windows move on: take over what is held now, and have it held where the prompts part.
            self.waiting[0].adopt_prefix()
            self._being_computed(self.waiting[0])
        for sequence in [seq for seq in self.running if seq.remaining > 1]:
            if sequence.status is not Status.RUNNING:
                continue
            count = self._fitting_chunk(sequence, budget)
            if not count and budget and alone and not items and self._reserve(sequence, sequence.cache_pos + 1):
                count = 1
            if count:
                items.append(self._item(sequence, count))
                budget -= count
        while self.waiting and budget:
            sequence = self.waiting[0]
            if sum(seq.places for seq in self.running) + sequence.places > self.limits.max_sequences:
                break
            count = 0 if self._being_computed(sequence) else self._admit(sequence, budget)
            if not count:
                break
            items.append(self._item(sequence, count))
            budget -= count
        return items

    def _fitting_chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prefill, at most `budget`, that can be run because blocks for them, and in groups without a
        window for all that follow, can be had; 0 if there are none."""
        count, known = sequence.next_chunk(budget), len(sequence.token_ids)
        while count and not self._try_reserve(sequence, known, sequence.cache_pos + count):
            count = count // 2 if self._cache.windows.any else 0
        return min(count, sequence.next_chunk(budget))

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Move the first waiting sequence to the running ones if there are blocks for it; the tokens of its first
        step."""
        sequence.adopt_prefix()
        sequence.begin_turn()
        while self._cache.windows.blocks(len(sequence.token_ids), 1) > self._cache.pool.limit - 1:
            if not self.on_shortage():
                return 0
        count = self._fitting_chunk(sequence, budget)
        if count:
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            self.running.append(sequence)
        return count

    def _being_computed(self, sequence: Sequence) -> bool:
        """True if a running prefill is about to compute more of this prompt than the cache holds: wait, then share. It
        will make a stop where they part."""
        held = max(sequence.cache_pos, self._cache.shared(sequence.token_ids).count)
        for other in self.running:
            if other.remaining > 1:
                shared = other.will_share(common_prefix_len(other.token_ids, sequence.token_ids[:-1]))
                if shared >= held + self._cache.block_size and shared > other.cache_pos:
                    other.stop_at(shared)
                    return True
        return False

    def _item(self, sequence: Sequence, count: int) -> ScheduledItem:
        return ScheduledItem(sequence, sequence.cache_pos, count, wants_logits=count == sequence.remaining)

    def _try_reserve(self, sequence: Sequence, token_count: int, step_end: int | None = None) -> bool:
        """Reserve, taking blocks from sequences that do not run if need be; False if that is not enough."""
        while True:
            try:
                sequence.reserve(token_count, step_end)
                return True
            except OutOfBlocks:
                if not self._reclaim(sequence):
                    return False

    def _reclaim(self, for_sequence: Sequence) -> bool:
        """Take what one sequence holds only for going back, else the blocks of one that is not running: the longest
        idle, else the last one waiting."""
        if any(sequence.drop_spare() for sequence in (*self.idle.values(), *self.waiting, *self.running)):
            return True
        return self.displace_one() or self.on_shortage() or self.displace_waiting(for_sequence)

    def displace_waiting(self, but: Sequence | None = None) -> bool:
        """Take the blocks of the last one waiting that has any."""
        for sequence in reversed(self.waiting):
            if sequence.holds_cache and sequence is not but:
                sequence.release_blocks()
                return True
        return False

    def make_room(self, count: int) -> bool:
        """See to it that `count` blocks are free, taking them from idle sessions if need be; False if they can't be."""
        held = {block_id for sequence in (*self.running, *self.waiting) for block_id in sequence.blocks}
        while self._cache.pool.limit - 1 - len(held) < count:
            if not self.on_shortage():
                return False
        while self._cache.pool.free_count + self._cache.evictable_count() < count:
            spare = any(sequence.drop_spare() for sequence in self.sequences())
            if not (spare or self.displace_one() or self.on_shortage()):
                return False
        self._cache.evict(count - self._cache.pool.free_count)
        return True

    def make_room_for_state(self) -> bool:
        """See to it that a slot for a recurrent state is free, as `make_room` does with blocks; checkpoints that nobody
        holds go first."""
        checkpoints = self._cache.checkpoints
        assert checkpoints is not None
        while not checkpoints.slots.free_count:
            if not (checkpoints.evict(1) or self.displace_one()):
                return False
        return True

    def displace_one(self) -> bool:
        """Take the blocks of the longest idle session; false if none has any."""
        for sequence in self.idle.values():
            if sequence.holds_cache:
                self.on_displace(sequence)
                sequence.release_blocks()
                return True
        return False

    def _reserve(self, sequence: Sequence, token_count: int) -> bool:
        """Reserve for a decode; if all else fails, the newest running sequence goes back to waiting and starts over."""
        while not self._try_reserve(sequence, token_count):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.release_blocks()
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)
