"""Whether running more rows in a step pays: measured costs of steps, and how many drafts they are worth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

SLOPE = 0.35
"""What a further row is taken to cost, in steps of one row, until it has been measured."""
KEPT = 9
"""Measurements of a size whose lower quartile counts: what else runs makes steps take several times as long, and never
less."""
STALE_STEPS = 64
BENEFIT_OF_DOUBT = ((8 * STALE_STEPS, 0.6), (2 * STALE_STEPS, 0.8))
"""A cost not measured for so many steps is believed to be this much lower at best, so that it is measured again."""
GAIN = 1.05
"""Fewer tokens per unit of time than this much more are not worth a guess."""


class StepCosts:
    """Seconds of steps by their number of rows, relative to each other.

    Contexts grow and other programs come and go; both slow all steps down alike. So steps without drafts set the unit,
    and steps with drafts are measured in it.
    """

    def __init__(self, size_of: Callable[[int], int]) -> None:
        """`size_of(rows)`: steps of one size cost the same."""
        self._size_of = size_of
        self._relative: dict[int, float] = {1: 1.0}
        self._measured: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._warm = {1}
        self._units: deque[float] = deque(maxlen=KEPT)
        self._steps = 0
        self._plain_at = 0

    @property
    def unit_is_stale(self) -> bool:
        """Whether a step without drafts is due."""
        return not self._units or self._steps - self._plain_at >= STALE_STEPS

    def add(self, rows: int, seconds: float, drafted: bool) -> None:
        """A step was run. The first one of a size is not counted: it may have compiled or allocated."""
        self._steps += 1
        size = self._size_of(rows)
        if size not in self._warm:
            self._warm.add(size)
        elif not drafted:
            self._plain_at = self._steps
            self._units.append(seconds / self._known(size))
        elif self._units:
            # What was taken for granted counts as a measurement until there are several.
            found = self._measured.setdefault(size, deque([self._known(size)], maxlen=KEPT))
            found.append(seconds / _usual(self._units))
            self._relative[size] = _usual(found)
            self._measured_at[size] = self._steps

    def report(self) -> dict[int, float]:
        """What was measured: sizes of steps and their costs in steps of one row."""
        return {size: round(cost, 3) for size, cost in sorted(self._relative.items())}

    def of(self, rows: int) -> float:
        """In steps of one row."""
        size = self._size_of(rows)
        age = self._steps - self._measured_at.get(size, self._steps)
        return self._known(size) * next((share for steps, share in BENEFIT_OF_DOUBT if age >= steps), 1.0)

    def worth_running(self, rows: int, chances: Sequence[float]) -> int:
        """How many drafts to add to a step of `rows` rows. `chances` are those of the drafts to come true, the best
        first."""
        if not chances or self.unit_is_stale:
            return 0
        best, count, tokens = GAIN * rows / self._known(self._size_of(rows)), 0, float(rows)
        for number, chance in enumerate(chances, 1):
            tokens += chance
            if tokens / self.of(rows + number) > best:
                best, count = tokens / self.of(rows + number), number
        return count

    def _known(self, size: int) -> float:
        """Measured, or guessed from the next smaller size that was."""
        if size in self._relative:
            return self._relative[size]
        below = max(known for known in self._relative if known < size)
        return self._relative[below] * (1 + SLOPE * (size / below - 1))


def _usual(found: deque[float]) -> float:
    return sorted(found)[len(found) // 4]
