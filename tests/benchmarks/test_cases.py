"""Benchmarks of many cases: as many as asked for, causes in turn, and an end at any moment keeps what was run."""

from __future__ import annotations

import os
import random
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common import until
from benchmarks.faults import SHARES, Case, spread_over, summary
from benchmarks.page import compared
from benchmarks.repetitions.__main__ import judged


@pytest.fixture(autouse=True)
def same_signals():
    """`until` takes SIGTERM for Ctrl-C in the process that it is called in."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("total", [0, 1, 17, 200])
def test_cases_add_up_to_what_was_asked_for(total):
    """200 faults were 198, as each family's share was rounded by itself."""
    shares = [share / 6 for share in SHARES.values() for _ in range(6)]
    counts = spread_over(total, shares)
    assert sum(counts) == total and all(
        abs(count - total * share) < 1 for count, share in zip(counts, shares, strict=True)
    )


def test_a_time_limit_ends_behind_the_case_that_reached_it(capsys):
    assert list(until(iter("abc"), None)) == ["a", "b", "c"]
    assert list(until(iter("abc"), 0.0)) == ["a"]
    assert capsys.readouterr().out == "Stopped after 0 s.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_cases_before_it(number, capsys):
    closed, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored

    def cases():
        try:
            yield 1
            os.kill(os.getpid(), number)
            yield 2
            yield 3
        finally:
            closed.append(True)

    try:
        assert list(until(cases(), None))[:1] == [1] and closed
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out == "Interrupted.\n"


def test_causes_take_turns_and_one_that_can_not_be_made_holds_up_nobody(capsys):
    verdicts = {"model": "model", "sampler": "model"}
    engine = SimpleNamespace(
        diagnose=lambda query: {"verdict": verdicts[query], "evidence": [{"run": "greedy", "sentence": "It loops."}]}
    )
    reply: Any = {cause: SimpleNamespace(query=cause, loop=None) for cause in verdicts}
    bench: Any = SimpleNamespace(engine=engine)
    made = {
        "cache": (bench, iter(())),
        "model": (bench, iter([reply["model"]] * 2)),
        "sampler": (bench, iter([reply["sampler"]] * 9)),
    }
    found = [(cause, verdict) for cause, verdict, _ in judged(made, 3)]
    assert found == [("model", "model"), ("sampler", "model")] * 2 + [("sampler", "model")]
    assert capsys.readouterr().out.count("It loops.") == 3, "a wrong verdict comes with its evidence"


def test_a_run_without_faults_has_no_shares():
    case = Case("qwen2", "fp32", None, "scale", False, "", 1.0)
    told = summary([case])
    assert (told["faults"], told["detected"], told["clean"], told["false_alarms"]) == (0, None, 1, 1)
    assert not case.right


def test_what_is_shown_is_compared_within_each_round():
    """A machine that gets slower changes no ratio."""
    dice = random.Random(1)
    pace = [dice.uniform(1, 5) for _ in range(5)]
    samples = {
        "closed": [{"tokens_per_s": 100 / one, "cpu_ms": 10 * one, "beside_ms": 1.0} for one in pace],
        "debug": [{"tokens_per_s": 98 / one, "cpu_ms": 11 * one, "beside_ms": 3.0} for one in pace],
    }
    found = compared(samples)
    assert found["debug"]["tokens_per_s_ratio"] == pytest.approx(0.98)
    assert found["debug"]["cpu_ms_ratio"] == pytest.approx(1.1) and found["debug"]["beside_ms"] == 3.0
