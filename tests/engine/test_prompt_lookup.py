"""Guesses from the text so far, and how many of them a step is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.prompt_lookup import LONGEST_MATCH, Acceptance, PromptLookup
from engine.sampling.step_costs import STALE_STEPS, StepCosts

SHORT_IDS = st.lists(st.integers(0, 3), max_size=60)


class CountedIds(list[int]):
    """Counts what is read of it."""

    read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found


def matches(ids: list[int], place: int) -> int:
    """Tokens before the place that are the last ones of the ids."""
    found = 0
    while found < min(place, LONGEST_MATCH) and ids[place - 1 - found] == ids[-1 - found]:
        found += 1
    return found


def continued(ids: list[int], place: int, count: int) -> tuple[int, ...]:
    follows = ids[place:]
    while len(follows) < count:
        follows.append(follows[len(follows) - (len(ids) - place)])
    return tuple(follows[:count])


@given(SHORT_IDS, st.lists(st.integers(1, 5)), st.integers(1, 9))
def test_a_guess_is_what_stood_behind_an_equal_place(ids, steps, most):
    """Whatever steps the ids came in: there is a guess exactly if the last two tokens stood before, and it follows a
    place that matches at least as well as the last place of the longest run looked up."""
    lookup, end = PromptLookup(), 1
    for step in (*steps, len(ids)):
        end = min(end + step, len(ids))
        seen = ids[:end]
        guess = lookup.guess(seen, most)
        places = [place for place in range(2, end) if seen[place - 2 : place] == seen[-2:]]
        assert bool(guess.token_ids) == bool(places and end >= 2)
        if guess.token_ids:
            fitting = [place for place in places if continued(seen, place, most) == guess.token_ids]
            assert guess.match in {matches(seen, place) for place in fitting}
            triples = [place for place in places if place >= 3 and seen[place - 3 : place] == seen[-3:]]
            assert guess.match >= (matches(seen, triples[-1]) if triples else 2)


def test_a_guess_goes_on_where_the_last_one_came_true():
    """A text that is copied has phrases that occur twice; the place that was copied from so far is the better guess."""
    source = [1, 2, 3, 7, 8, 9, 1, 2, 3, 5, 6]
    lookup = PromptLookup()
    ids = [*source, 20, 7, 8, 9]
    assert lookup.guess(ids, 3).token_ids == (1, 2, 3)
    ids += [1, 2, 3]
    assert lookup.guess(ids, 2).token_ids == (5, 6)
    ids = [*source, 20, 1, 2, 3]
    lookup = PromptLookup()
    assert lookup.guess(ids, 2).token_ids == (5, 6)  # the later of two places that match equally far


def test_a_period_goes_round():
    assert PromptLookup().guess([4, 5, 6, 4, 5, 6, 4, 5], 7).token_ids == (6, 4, 5, 6, 4, 5, 6)


def test_a_step_costs_what_it_adds():
    ids = CountedIds(index * index % 9973 for index in range(20_000))
    lookup = PromptLookup()
    lookup.guess(ids, 15)
    for step in range(300):
        ids.append(ids[step])
        ids.read = 0
        lookup.guess(ids, 15)
        assert ids.read < 150


def test_acceptance_follows_what_came_true():
    fresh, good, bad = Acceptance(), Acceptance(), Acceptance()
    for _ in range(60):
        good.add(5, True)
        bad.add(5, False)
    assert bad.chances(5, 1)[0] < 0.1 < fresh.chances(5, 1)[0] < 0.95 < good.chances(5, 1)[0]
    assert good.chances(2, 1) == fresh.chances(2, 1)  # a short match is another matter
    chances = fresh.chances(2, 15)
    assert chances == sorted(chances, reverse=True) and 0 < chances[-1] < chances[0] < 1
    for _ in range(60):
        good.add(5, False)
    assert good.chances(5, 1)[0] < 0.5  # old outcomes fade


def test_guesses_that_were_never_run_count_too():
    """Whether drafts pay is known before the first one is run."""
    lookup, ids = PromptLookup(), [*range(40), 100, *range(3)]
    for token_id in range(3, 12):
        lookup.guess(ids, 4)
        ids.append(token_id)
    lookup.guess(ids, 4)
    liars, false = PromptLookup(), [*range(40), 100, *range(3)]
    for index in range(9):
        liars.guess(false, 4)
        false += [200 + index, *range(3)]
    assert lookup.acceptance.chances(3, 1)[0] > Acceptance().chances(3, 1)[0] > liars.acceptance.chances(3, 1)[0]


# -- what a step is worth ---------------------------------------------------------------------------------------------


def tiles(rows: int) -> int:
    return 1 if rows == 1 else -(-rows // 4) * 4


def learned(seconds, speed: float = 1.0) -> StepCosts:
    """Costs after steps of several sizes; `seconds(size)` is what one takes."""
    costs = StepCosts(tiles)
    for _ in range(30):
        for rows, drafted in ((1, False), (4, True), (8, True)):
            costs.add(rows, speed * seconds(tiles(rows)), drafted)
    costs.add(1, speed * seconds(1), False)
    return costs


def test_drafts_are_run_where_the_tokens_they_bring_outweigh_their_time():
    tile = learned(lambda size: 1.0 if size == 1 else 2.1 * size / 4)
    assert tile.worth_running(1, [0.95, 0.9, 0.85, 0.8]) == 3  # a tile is filled, and no second one begun
    assert tile.worth_running(1, [0.5, 0.25, 0.12]) == 0
    assert tile.worth_running(1, []) == 0
    flat = learned(lambda size: 1 + 0.01 * size)
    assert flat.worth_running(1, [0.5, 0.25, 0.12]) == 3
    assert flat.worth_running(1, [0.9**n for n in range(1, 8)]) == 7
    assert learned(lambda size: float(size)).worth_running(1, [0.99, 0.98, 0.97]) == 0


def test_steps_of_several_replies_share_what_a_step_costs():
    costs = learned(lambda size: 1.0 if size == 1 else 2.1 * size / 4)
    assert costs.worth_running(2, [0.5, 0.4]) == 2  # the tile is run anyway
    assert costs.worth_running(4, [0.5, 0.4]) == 0  # here a second one would be


@pytest.mark.parametrize("speed", [0.01, 100.0])
def test_costs_are_relative(speed):
    """A longer context or a busy machine slows all steps: what pays stays what it was."""
    costs = learned(lambda size: 1.0 if size == 1 else 2.1 * size / 4)
    for _ in range(60):
        costs.add(1, speed, False)
    assert costs.of(4) == pytest.approx(2.1, rel=0.35)
    assert costs.worth_running(1, [0.95, 0.9, 0.85]) == 3


def test_a_cost_is_measured_again_in_time():
    """Guard: one slow step, while another program ran, would have ended drafts for good."""
    costs = learned(lambda size: 3.0 if size > 1 else 1.0)
    chances, tried = [0.6, 0.36, 0.2], 0
    assert costs.worth_running(1, chances) == 0
    for _ in range(100 * STALE_STEPS):
        count = costs.worth_running(1, chances)
        tried += count > 0
        costs.add(1 + count, 1.5 if count else 1.0, count > 0)
    assert costs.worth_running(1, chances) == 3 and tried > 50 * STALE_STEPS


def test_a_step_without_drafts_is_due_from_time_to_time():
    """The unit would grow old while each step has drafts."""
    costs, plain = learned(lambda size: 1.0 if size == 1 else 1.2), 0
    for _ in range(3 * STALE_STEPS):
        count = costs.worth_running(1, [0.99, 0.98, 0.97])
        plain += count == 0
        costs.add(1 + count, 1.2 if count else 1.0, count > 0)
    assert 2 <= plain <= 4


def test_the_first_step_of_a_size_says_nothing():
    """It compiles, captures or allocates."""
    costs = StepCosts(tiles)
    costs.add(1, 1.0, False)
    costs.add(4, 1000.0, True)
    costs.add(4, 1.5, True)
    assert costs.of(4) < 2.1
