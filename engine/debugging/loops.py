"""Loops in generated ids: exact ones of a fixed period, and near ones by how many n-grams are repeated. No torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import islice

from engine.protocol import Loop

MAX_PERIOD = 64
REPEATS = 3
MIN_SPAN = 36
"""Tokens that a loop covers at least: three equal words are no loop yet."""
MIN_SYMBOL_SPAN = 256
"""The same where nothing in a period is a word: rules of tables, matrices and indentation repeat by nature."""
NGRAM = 4
WINDOW = 128
NEAR_SHARE, SAME_SHARE = 0.65, 0.55
WORD_SHARE = 0.25


class LoopDetector:
    """Fed one id after the other; `loop` is the last loop found, growing while it goes on.

    Exact: the last max(3 p, `MIN_SPAN`) ids repeat with a period p of 1 to 64; the smallest such p is told. Near: of
    the last `WINDOW` n-grams, `NEAR_SHARE` were there before within the `MAX_PERIOD` ids before them: the measure rep/l
    of Welleck et al. 2019, "Neural Text Generation with Unlikelihood Training", section 6.1, for n-grams in place of
    single tokens; and `SAME_SHARE` at one and the same distance, the period: what a list or code repeats comes at
    changing distances. Fewer words than `WORD_SHARE` make no near-loop. Work per id is bounded by the longest period.

    `is_word` tells whether an id holds a letter; without it all ids count as words.
    """

    def __init__(self, is_word: Callable[[int], bool] | None = None) -> None:
        self.loop: Loop | None = None
        self._is_word = is_word or (lambda token_id: True)
        self._count = 0
        self._recent: deque[int] = deque([-1] * MAX_PERIOD, MAX_PERIOD)
        self._runs = [0] * MAX_PERIOD
        """For each period, how many of the last ids equal the one a period before."""
        self._window = _NgramWindow()

    def push(self, token_id: int) -> Loop | None:
        """Take the next id; the loop that it belongs to, None if it belongs to none."""
        self._runs = [run + 1 if other == token_id else 0 for run, other in zip(self._runs, self._recent, strict=True)]
        self._recent.appendleft(token_id)
        self._count += 1
        period = self._window.push(token_id)
        found = self._exact() or self._near(period)
        if found is not None:
            self.loop = found
        return found

    def _exact(self) -> Loop | None:
        for period, run in enumerate(self._runs, start=1):
            span = run + period
            if span >= max(REPEATS * period, MIN_SPAN) and (span >= MIN_SYMBOL_SPAN or self._words(period)):
                return Loop(period, self._count - span, span // period)
        return None

    def _near(self, period: int | None) -> Loop | None:
        if period is None or self._words(MAX_PERIOD) < WORD_SHARE * MAX_PERIOD:
            return None
        if self._runs[period - 1] >= period:
            return None  # a whole period without a change: an exact loop in the making
        known = self.loop
        start = self._count - WINDOW
        if known is not None and known.near and known.start + known.repeats * known.period >= start:
            start = known.start  # the same one goes on
        return Loop(period, start, (self._count - start) // period, near=True)

    def _words(self, count: int) -> int:
        return sum(self._is_word(token_id) for token_id in islice(self._recent, count))


class _NgramWindow:
    """Of the last `WINDOW` n-grams: how many were there before, at most `MAX_PERIOD` ids ago, and how long ago."""

    def __init__(self) -> None:
        self._ngram: deque[int] = deque(maxlen=NGRAM)
        self._seen: dict[tuple[int, ...], int] = {}
        self._keys: deque[tuple[int, ...]] = deque()
        self._held: deque[int] = deque()
        """The distance to its last occurrence of each n-gram in the window; 0 where there is none."""
        self._distances: Counter[int] = Counter()
        self._position = 0

    def push(self, token_id: int) -> int | None:
        """Take an id; the distance at which most n-grams repeat, if enough of them do."""
        self._position += 1
        self._ngram.append(token_id)
        key = tuple(self._ngram)
        distance = self._position - self._seen.get(key, self._position)
        self._remember(key)
        self._held.append(distance)
        self._distances[distance] += 1
        if len(self._held) > WINDOW:
            self._forget(self._held.popleft())
        if len(self._held) < WINDOW or self._distances[0] > (1 - NEAR_SHARE) * WINDOW:
            return None
        most = max(self._distances, key=lambda known: self._distances[known] if known else 0)
        return most if self._distances[most] >= SAME_SHARE * WINDOW else None

    def _remember(self, key: tuple[int, ...]) -> None:
        self._seen[key] = self._position
        self._keys.append(key)
        if len(self._keys) > MAX_PERIOD:
            old = self._keys.popleft()
            if self._seen[old] <= self._position - MAX_PERIOD:
                del self._seen[old]

    def _forget(self, distance: int) -> None:
        self._distances[distance] -= 1
        if not self._distances[distance]:
            del self._distances[distance]


def find_loop(token_ids: Iterable[int], is_word: Callable[[int], bool] | None = None) -> Loop | None:
    """The last loop in a stored reply, with all of its repetitions; None if there is none."""
    detector = LoopDetector(is_word)
    for token_id in token_ids:
        detector.push(token_id)
    return detector.loop


def word_test(token_text: Callable[[int], bytes]) -> Callable[[int], bool]:
    """Whether a token's bytes hold a letter of some script (bytes from 0x80 on belong to one, or to a symbol)."""
    known: dict[int, bool] = {}

    def is_word(token_id: int) -> bool:
        found = known.get(token_id)
        if found is None:
            found = known[token_id] = any(byte >= 0x80 or chr(byte).isalpha() for byte in token_text(token_id))
        return found

    return is_word
