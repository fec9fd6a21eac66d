"""From findings to a verdict: which cause goes before which, what is advised, what counts as rounding."""

from __future__ import annotations

import pytest

from engine.debugging.protocol import TokenMeasure
from engine.debugging.verdict import Drift, Findings, advice, cure, drift, judge, stronger
from engine.protocol import Loop
from engine.sampling.params import SamplingParams

LOOP = Loop(3, 10, 12)
STILL, MOVED = Drift(0.01, 0.25, None), Drift(2.0, 0.25, 7)
ALL, NONE = (3, 3), (0, 2)


@pytest.mark.parametrize(
    ("verdict", "found"),
    [
        ("none", Findings(None, audit_faults=3)),
        ("cache", Findings(LOOP, 1, STILL, ALL, advised=NONE)),
        ("cache", Findings(LOOP, 0, MOVED, ALL, exact=NONE, kl=1.0)),
        ("cache", Findings(LOOP, None, None, NONE, parted_by_rounding=False, advised=ALL)),
        ("model", Findings(LOOP, None, None, NONE, parted_by_rounding=True, advised=ALL)),
        ("precision", Findings(LOOP, 0, STILL, ALL, exact=NONE, kl=0.3, advised=NONE)),
        # Two of five loops, none in float32: with a format that spoils the text anyway, it was called the sampler's.
        ("precision", Findings(LOOP, 0, STILL, (2, 5), exact=(0, 5), kl=0.57, advised=NONE)),
        ("sampler", Findings(LOOP, 0, STILL, (2, 5), exact=(0, 5), kl=0.07, advised=NONE)),
        ("precision", Findings(LOOP, 0, STILL, (3, 5), exact=(0, 5), kl=0.07, advised=NONE)),
        ("sampler", Findings(LOOP, 0, STILL, (4, 5), exact=(2, 5), kl=0.07, advised=NONE)),
        ("sampler", Findings(LOOP, 0, STILL, (5, 5), exact=(3, 5), kl=0.57, advised=NONE)),
        ("sampler", Findings(LOOP, 0, STILL, ALL, exact=NONE, kl=0.001, advised=NONE)),
        ("sampler", Findings(LOOP, 0, STILL, ALL, exact=ALL, kl=0.3, advised=(1, 3))),
        ("model", Findings(LOOP, 0, STILL, ALL, exact=ALL, kl=0.3, advised=(2, 3))),
        ("model", Findings(LOOP, 0, STILL, ALL)),
    ],
)
def test_the_cause_deepest_in_the_machine_is_named(verdict, found):
    assert judge(found) == verdict


def test_only_settings_that_lead_into_loops_are_changed():
    assert advice(SamplingParams(temperature=0)) == {"temperature": 0.7, "repetition_penalty": 1.1}
    assert advice(SamplingParams(temperature=0.8, repetition_penalty=1.2)) == {}
    odd = SamplingParams(top_k=1, top_p=0.1, min_p=0.9, repetition_penalty=0.8, frequency_penalty=-1.0)
    assert advice(odd) == {
        "top_k": 0, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": 0.0
    }  # fmt: skip
    assert advice(SamplingParams(repetition_penalty=1.1, logit_bias={5: 40.0, 6: -3.0})) == {"logit_bias": {6: -3.0}}
    assert stronger(SamplingParams(temperature=0))["repetition_penalty"] == 1.3


def measures(count: int, logprob: float = -1.0, entropy: float = 2.0) -> list[TokenMeasure]:
    return [TokenMeasure(logprob, 0, entropy, 0.5)] * count


def test_live_numbers_beside_fresh_ones():
    assert drift(measures(9), measures(9), measures(9)).first is None
    other = [*measures(4), TokenMeasure(-1.0, 0, 2.6, 0.5), *measures(4)]
    found = drift(other, measures(9), measures(9))
    assert found.first == 4 and found.worst == pytest.approx(0.6)
    # What another cutting into steps changes as much is no sign of anything.
    assert drift(other, measures(9), measures(9, entropy=2.2)).first is None
    # A token that neither took for likely: its logit may be rounded by whole nats.
    assert drift(measures(9, -14.0), measures(9, -15.0), measures(9, -15.0)).first is None
    assert drift([], measures(9), measures(9)).first is None


def test_each_verdict_has_its_cure():
    assert cure("cache")["repair"] is True
    assert cure("precision", kv_format="fp16")["params"]["kv_format"] == "fp16"
    assert cure("sampler", {"temperature": 0.7})["params"] == {"temperature": 0.7}
    assert cure("model", {}) is None and cure("none") is None
