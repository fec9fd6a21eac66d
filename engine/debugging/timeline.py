"""Where the time of the last turns went: what was done before each, its steps, and the parts of a step. No torch.

A turn's steps are kept in a fixed number of slots: when these are full, neighbours are put together, so that a reply of
any length takes the same memory and a step costs a few additions. Moments are seconds of `time.perf_counter`.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.protocol import TimedSpan, TurnStats

SESSIONS, TURNS = 64, 8
"""Sessions, and turns of each, that are remembered."""
SLOTS = 128
OPEN_STEPS = 64
"""Steps that are added up in one go."""
PARTS = ("schedule", "copy", "model", "sample", "detokenise")
"""Of a step, one after another. On a card "model" only launches and "sample" waits for the result."""
_START, _END, _KIND, _STEPS, _TOKENS, _FIRST_PART = range(6)
_WIDTH = _FIRST_PART + len(PARTS)
StepRecord = tuple[float, float, float, float, float, float]
"""Of a step: when it began and ended, and the seconds of each part but the last, which is each turn's own."""


@dataclass(slots=True)
class StepTimes:
    """Moments of the step that runs now; each step overwrites them."""

    began: float = 0.0
    scheduled: float = 0.0
    copied: float = 0.0
    computed: float = 0.0
    sampled: float = 0.0

    def cut_short(self) -> None:
        """The step was given up while the model ran."""
        self.copied = max(self.copied, self.scheduled)
        self.computed = self.sampled = time.perf_counter()

    def record(self, ended: float) -> StepRecord:
        return (
            self.began,
            ended,
            self.scheduled - self.began,
            self.copied - self.scheduled,
            self.computed - self.copied,
            self.sampled - self.computed,
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """`steps` steps of a turn together: when they began and ended, their tokens, and the seconds of each of `PARTS`."""

    start: float
    end: float
    decode: bool
    steps: int
    tokens: int
    parts: tuple[float, ...]


class Steps:
    """A turn's steps, oldest first, in at most `capacity` slots (at least 4)."""

    def __init__(self, capacity: int = SLOTS) -> None:
        self._rows = array("d", bytes(8 * _WIDTH * capacity))
        self._capacity = capacity
        self._used = 0
        self._steps_per_slot = [1, 1]
        self._open: list[StepRecord] = []
        self._open_limit, self._decode = 1, False
        self._tokens, self._detokenise_s = 0, 0.0

    def add(self, record: StepRecord, decode: bool, tokens: int, detokenise_s: float) -> None:
        """Count one step; the record may be shared by all turns of the step."""
        if decode is not self._decode or len(self._open) >= self._open_limit:
            self._close()
            self._decode, self._open_limit = decode, min(self._steps_per_slot[decode], OPEN_STEPS)
        self._open.append(record)
        self._tokens += tokens
        self._detokenise_s += detokenise_s

    def _close(self) -> None:
        """The open steps into the newest slot, or into a new one."""
        rows, count = self._rows, len(self._open)
        if not count:
            return
        at = (self._used - 1) * _WIDTH
        limit = self._steps_per_slot[self._decode]
        if not self._used or rows[at + _KIND] != self._decode or rows[at + _STEPS] + count > limit:
            if self._used == self._capacity:
                self._make_room()
            at = self._used * _WIDTH
            self._used += 1
            rows[at : at + _WIDTH] = array("d", bytes(8 * _WIDTH))
            rows[at + _START], rows[at + _KIND] = self._open[0][0], self._decode
        sums = (count, self._tokens, *map(sum, zip(*(record[2:] for record in self._open), strict=True)))
        for field, value in enumerate((*sums, self._detokenise_s), start=at + _STEPS):
            rows[field] += value
        rows[at + _END] = self._open[-1][1]
        self._open.clear()
        self._tokens, self._detokenise_s = 0, 0.0

    def __iter__(self) -> Iterator[Slot]:
        self._close()
        for at in range(0, self._used * _WIDTH, _WIDTH):
            start, end, kind, steps, tokens, *parts = self._rows[at : at + _WIDTH]
            yield Slot(start, end, bool(kind), int(steps), int(tokens), tuple(parts))

    def copy(self) -> Steps:
        self._close()
        twin = Steps(self._capacity)
        twin._rows, twin._used, twin._steps_per_slot = self._rows[:], self._used, list(self._steps_per_slot)
        return twin

    def _make_room(self) -> None:
        """Put neighbours of the kind that has more slots together, two by two; the oldest goes if there are none."""
        rows, used = self._rows, self._used
        kind = float(2 * sum(rows[_KIND : used * _WIDTH : _WIDTH]) > used)
        self._steps_per_slot[int(kind)] *= 2
        limit, kept = self._steps_per_slot[int(kind)], 1
        for index in range(1, used):
            at, before = index * _WIDTH, (kept - 1) * _WIDTH
            same = rows[at + _KIND] == rows[before + _KIND] == kind
            if same and rows[at + _STEPS] + rows[before + _STEPS] <= limit:
                rows[before + _END] = rows[at + _END]
                for field in range(_STEPS, _WIDTH):
                    rows[before + field] += rows[at + field]
            else:
                rows[kept * _WIDTH : (kept + 1) * _WIDTH] = rows[at : at + _WIDTH]
                kept += 1
        if kept == used:
            rows[: (used - 1) * _WIDTH] = rows[_WIDTH : used * _WIDTH]
            kept -= 1
        self._used = kept


class TurnTrace:
    """One turn. Only the engine thread writes to it; what callers did before is handed over with the request."""

    def __init__(self, turn_id: str = "", submitted: float = 0.0, before: Sequence[TimedSpan] = ()) -> None:
        self.turn_id = turn_id
        self.submitted = submitted
        self.before = tuple(before)
        """On the caller's thread: rendering, reading what is kept on disk."""
        self.preparing: list[TimedSpan] = []
        """On the engine thread before the first step; what is not covered until then is the queue."""
        self.ended: float | None = None
        self.stats: TurnStats | None = None
        self.steps = Steps()
        self._detokenise_s = 0.0

    def detokenised(self, seconds: float) -> None:
        """Time of this turn within the step that runs now."""
        self._detokenise_s += seconds

    def step(self, record: StepRecord, decode: bool, tokens: int) -> None:
        """A step with so many tokens of this turn is over."""
        self.steps.add(record, decode, tokens, self._detokenise_s)
        self._detokenise_s = 0.0

    def copy(self) -> TurnTrace:
        """As it is now."""
        twin = TurnTrace(self.turn_id, self.submitted, self.before)
        twin.preparing, twin.steps = [*self.preparing], self.steps.copy()
        twin.ended, twin.stats = self.ended, self.stats
        return twin

    def end(self, stats: TurnStats | None) -> None:
        self.ended, self.stats = time.perf_counter(), stats


class Timeline:
    """The last turns of the sessions that were used last. Lives on the engine thread."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, deque[TurnTrace]] = OrderedDict()
        self._restores: dict[str, TimedSpan] = {}

    def begin(self, session_id: str | None, trace: TurnTrace) -> None:
        """A turn is queued; turns without a session are not kept."""
        if session_id is None:
            return
        restore = self._restores.pop(session_id, None)
        if restore is not None and restore.start >= trace.submitted:
            trace.preparing.insert(0, restore)
        self._turns.setdefault(session_id, deque(maxlen=TURNS)).append(trace)
        self._turns.move_to_end(session_id)
        while len(self._turns) > SESSIONS:
            self._restores.pop(self._turns.popitem(last=False)[0], None)

    def restored(self, session_id: str, start: float) -> None:
        """What was kept of a session has been put back into the pool since `start`; it goes with the turn behind it."""
        self._restores[session_id] = TimedSpan("restore", start, time.perf_counter())
        if len(self._restores) > SESSIONS:
            del self._restores[next(iter(self._restores))]

    def turns(self, session_id: str) -> list[TurnTrace]:
        """Copies, oldest first, which another thread may read; none for an unknown session."""
        return [trace.copy() for trace in self._turns.get(session_id, ())]

    def forget(self, session_id: str) -> None:
        self._turns.pop(session_id, None)
        self._restores.pop(session_id, None)
