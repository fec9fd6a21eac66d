"""Loops in ids: found early, told rightly, and not seen in texts that repeat by nature."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.debugging.loops import MAX_PERIOD, MIN_SPAN, MIN_SYMBOL_SPAN, WINDOW, LoopDetector, find_loop, word_test
from engine.tokenizer import ChatTokenizer


def fresh(count: int, seed: int = 0) -> list[int]:
    """Ids that do not repeat."""
    return random.Random(seed).sample(range(1000, 60000), count)


@pytest.mark.parametrize("period", range(1, MAX_PERIOD + 1))
def test_every_period_is_found_within_three_of_it(period):
    unit, before = fresh(period, 1), [7, 8, 9]
    detector = LoopDetector()
    ids = before + unit * 40
    found_at = next(count for count, token_id in enumerate(ids, start=1) if detector.push(token_id))
    assert found_at - len(before) == max(3 * period, MIN_SPAN)
    loop = detector.loop
    assert (loop.period, loop.start, loop.near) == (period, len(before), False)
    assert loop.repeats == (found_at - len(before)) // period


def test_a_loop_grows_while_it_goes_on_and_is_remembered_when_it_ends():
    unit = fresh(10)
    detector = LoopDetector()
    for token_id in unit * 7:
        detector.push(token_id)
    assert detector.loop.repeats == 7
    assert detector.push(5) is None
    assert detector.loop.repeats == 7 and find_loop(unit * 7 + fresh(200, 3)).repeats == 7


@pytest.mark.parametrize("period", [65, 80, 150])
def test_longer_periods_are_no_exact_loop(period):
    assert find_loop(fresh(period) * 4) is None


def test_what_is_no_word_may_repeat_for_longer():
    dashes = [1, 2] * (MIN_SYMBOL_SPAN // 2 - 1)
    assert find_loop(dashes, lambda token_id: False) is None
    assert find_loop([*dashes, 1, 2], lambda token_id: False).period == 2
    assert find_loop(dashes, lambda token_id: token_id == 2).period == 2


@pytest.mark.parametrize("period", [12, 25, 50])
def test_a_text_that_changes_one_token_each_time_is_a_near_loop(period):
    unit = fresh(period - 1)
    ids = [5, *[token_id for number in range(400 // period) for token_id in (number, *unit)]]
    loop = find_loop(ids)
    assert loop is not None and loop.near and loop.period == period
    assert loop.repeats >= 3


def test_a_near_loop_is_one_event_that_grows():
    unit = fresh(19)
    detector = LoopDetector()
    starts = set()
    for number in range(40):
        for token_id in (number, *unit):
            if detector.push(token_id) is not None:
                starts.add(detector.loop.start)
    assert len(starts) == 1 and detector.loop.repeats >= 30


def test_work_per_id_is_bounded():
    """Nothing that the detector holds grows with the text."""
    detector = LoopDetector()
    for token_id in fresh(20_000):
        detector.push(token_id)
    window = detector._window
    assert len(detector._runs) == len(detector._recent) == MAX_PERIOD
    assert max(map(len, (window._held, window._keys, window._seen, window._distances))) <= WINDOW


def test_the_smallest_period_is_told():
    assert find_loop([1, 2] * 40).period == 2
    assert find_loop([4] * 40).period == 1


def test_words_are_told_from_symbols_in_any_script():
    texts = {1: b" |", 2: b"  42", 3: b" word", 4: "世".encode(), 5: b"", 6: b"\xe4"}
    is_word = word_test(texts.__getitem__)
    assert [is_word(token_id) for token_id in texts] == [False, False, True, True, False, True]


ROWS = [("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Peru", "Lima"), ("Japan", "Tokyo")]
NATURAL = {
    "matrix": "\n".join("[" + ", ".join(["0"] * 8) + "]," for _ in range(8)),
    "empty table": "| Name | Mon | Tue |\n|---|---|---|\n| Ann |  |  |\n| Bob |  |  |\n| Cem |  |  |\n| Dan |  |  |\n",
    "rules": "=" * 79 + "\nTitle\n" + "-" * 120,
    "html": "".join(f"  <tr>\n    <td>{left}</td>\n    <td>{right}</td>\n  </tr>\n" for left, right in ROWS),
    "counting": ", ".join(map(str, range(1, 201))),
    "csv": "".join(f"2024-01-{day:02},{100 + day}.5,{3000 + 7 * day}\n" for day in range(1, 31)),
    "switch": "".join(
        f'    case {i}:\n        return "{name}";\n        break;\n' for i, (name, _) in enumerate(ROWS * 2)
    ),
    "song": "Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, merrily,\n" * 2,
    "laughter": "Ha ha ha ha ha ha ha ha ha, that is so funny! No, no, no, no, no! Bla bla bla bla.",
    "LaTeX": "\\begin{pmatrix}\n" + "\\\\\n".join(" & ".join(["0"] * 6) for _ in range(6)) + "\n\\end{pmatrix}",
}


@pytest.fixture(scope="module")
def tokenizer(default_model) -> ChatTokenizer:
    return ChatTokenizer.from_source(default_model, None)


@pytest.mark.model
@pytest.mark.parametrize("name", NATURAL)
def test_no_alarm_on_what_repeats_by_nature(tokenizer, name):
    assert find_loop(tokenizer.encode(NATURAL[name]), word_test(tokenizer.shown_bytes)) is None


@pytest.mark.model
def test_no_alarm_on_code_and_prose(tokenizer):
    """The program's own sources, line by line alike as they are in places."""
    root, is_word = Path(__file__).parents[2], word_test(tokenizer.shown_bytes)
    for path in [root / "README.md", *sorted((root / "engine").glob("*.py")), *sorted((root / "ui").rglob("*.py"))]:
        assert find_loop(tokenizer.encode(path.read_text("utf-8")), is_word) is None, path.name
