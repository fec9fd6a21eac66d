"""Guesses how a sequence goes on: as it did where its last tokens stood before. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GRAMS = (3, 2)
"""Lengths of the runs of tokens that are looked up, the longest first."""
LONGEST_MATCH = 16
"""Tokens before a place that are compared at most; a longer match says no more."""
CLASS_STARTS = (2, 3, 4, 6, 9, LONGEST_MATCH)
_PRIORS = (0.33, 0.5, 0.65, 0.75, 0.87, 0.95)
_PRIOR_WEIGHT, _KEPT = 6.0, 0.98


@dataclass(frozen=True, slots=True)
class Guess:
    """`token_ids` stood behind an earlier place whose last `match` tokens are those of the sequence."""

    token_ids: tuple[int, ...]
    match: int


NO_GUESS = Guess((), 0)


class Acceptance:
    """How often the next token of a guess came true, by how much had matched before it. Old outcomes fade."""

    def __init__(self) -> None:
        self._trials = [_PRIOR_WEIGHT] * len(_PRIORS)
        self._hits = [_PRIOR_WEIGHT * prior for prior in _PRIORS]

    def add(self, match: int, came_true: bool) -> None:
        index = _match_class(match)
        self._trials[index] = self._trials[index] * _KEPT + 1
        self._hits[index] = self._hits[index] * _KEPT + came_true

    def chances(self, match: int, count: int) -> list[float]:
        """Of each of the next `count` tokens, that it and all before it come true."""
        chance, found = 1.0, []
        for index in range(count):
            which = _match_class(match + index)
            chance *= self._hits[which] / self._trials[which]
            found.append(chance)
        return found


def _match_class(match: int) -> int:
    return sum(match >= start for start in CLASS_STARTS) - 1


class PromptLookup:
    """The index of one reply's ids, prompt included. A step costs what it adds, however long the context is.

    Each guess is held against what comes, whether it was run as a draft or not: `acceptance` costs no model time.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._places: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in GRAMS)
        self._indexed = 0
        self._seen = 0
        self._cursor = 0
        self._guess = NO_GUESS

    def guess(self, token_ids: Sequence[int], most: int) -> Guess:
        """At most `most` tokens that may follow; `token_ids` must begin with those of the call before."""
        self._score(token_ids)
        self._index(token_ids)
        place, match = self._find(token_ids)
        follows = list(token_ids[place : place + most]) if match else []
        while match and len(follows) < most:  # the text has caught up with itself: a period goes round
            follows.append(follows[place + len(follows) - len(token_ids)])
        self._cursor, self._guess = place, Guess(tuple(follows), match)
        return self._guess

    def _score(self, token_ids: Sequence[int]) -> None:
        """Hold the last guess against what came, and move the cursor along as far as it came true."""
        new = token_ids[self._seen :]
        self._seen = len(token_ids)
        match = self._guess.match
        for index, (guessed, came) in enumerate(zip(self._guess.token_ids, new, strict=False)):
            self.acceptance.add(match + index, guessed == came)
            if guessed != came:
                match = 0
                break
        followed = match and len(new) <= len(self._guess.token_ids)
        self._cursor = self._cursor + len(new) if followed else 0

    def _index(self, token_ids: Sequence[int]) -> None:
        """Enter all runs that something follows; of equal ones the last."""
        end = len(token_ids)
        for length, places in zip(GRAMS, self._places, strict=True):
            first = max(self._indexed, length)
            runs = zip(*(token_ids[first - length + i : end - length + i] for i in range(length)), strict=False)
            places.update(zip(runs, range(first, end), strict=False))
        self._indexed = max(self._indexed, end)

    def _find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The place whose continuation is the guess, and how many tokens before it match; (0, 0) if there is none."""
        held = _match_length(token_ids, self._cursor) if self._cursor else 0
        if held < LONGEST_MATCH:
            for length, places in zip(GRAMS, self._places, strict=True):
                place = places.get(tuple(token_ids[-length:]))
                if place is not None:
                    found = _match_length(token_ids, place)
                    return (place, found) if found > held else (self._cursor, held)
        return self._cursor, held


def _match_length(token_ids: Sequence[int], place: int) -> int:
    end, count = len(token_ids), 0
    while count < min(place, LONGEST_MATCH) and token_ids[place - 1 - count] == token_ids[end - 1 - count]:
        count += 1
    return count
