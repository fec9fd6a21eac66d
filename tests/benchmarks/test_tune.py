"""Tuning: which candidates there are, which one is taken, and that the kernels' table reads what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tune
from benchmarks.gpu.timing import Timer
from kernels.gpu import tuning
from tests.support import interpreter

CPU = torch.device("cpu")
SIZES = tune.Sizes(context=20, chunk=5, matrix=(16, 256), several=2, heads=tune.HEADS[:1])


class Clock(Timer):
    """Says what a launch takes: the sum of its present values, in the milliseconds of `costs` where they are given."""

    def __init__(self, kernel: str, costs: dict[int, float]) -> None:
        super().__init__(CPU, 1)
        self.kernel, self.costs = kernel, costs

    def cold(self, runs: Any) -> dict[str, list[float]]:
        values = tuning.launch_params(self.kernel, 80)
        return {"run": [self.costs.get(values["BLOCK"], 10.0)]}


def chosen(costs: dict[int, float], fails_at: int | None = None) -> tune.Choice:
    def run() -> None:
        if tuning.launch_params("swiglu", 80)["BLOCK"] == fails_at:
            raise RuntimeError("out of resource: shared memory")

    return tune.choose(tune.Job("swiglu", {"BLOCK": (1024, 2048, 4096)}, run), 80, Clock("swiglu", costs))


def test_the_clearly_fastest_is_taken() -> None:
    assert chosen({1024: 9.0, 4096: 5.0}) == tune.Choice("swiglu", {"BLOCK": 4096, "num_warps": 4}, 10.0, 5.0, True)
    assert tuning.launch_params("swiglu", 80)["BLOCK"] == 2048, "trying must leave the table as it was"


def test_what_is_hardly_faster_is_not() -> None:
    kept = chosen({1024: 9.9, 4096: 9.8})
    assert not kept.changed and kept.values["BLOCK"] == 2048 and kept.ms == 10.0


def test_what_can_not_be_launched_is_not_taken() -> None:
    assert chosen({1024: 9.0, 4096: 5.0}, fails_at=4096).values["BLOCK"] == 1024


def test_candidates_begin_with_the_present_and_old_cards_copy_nothing_ahead() -> None:
    found = tune.candidates("paged_decode_128", tune.ATTENTION, 86)
    assert found[0] == tuning.launch_params("paged_decode_128", 86)
    assert len(found) == len({str(sorted(values.items())) for values in found}) == 4 * 3 * 3
    assert {values["STAGES"] for values in tune.candidates("paged_decode_128", tune.ATTENTION, 75)} == {1}


def test_the_table_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.json"
    assert tuning.read_tuned(path) == {}
    values = {"BLOCK": 4096, "num_warps": 8}
    tune.write([tune.Choice("swiglu", values, 2.0, 1.0, True)], 86, path)
    tune.write(
        [
            tune.Choice("swiglu", {"BLOCK": 1024, "num_warps": 4}, 2.0, 1.0, True),
            tune.Choice("sample", {"CHUNK": 1}, 1.0, 1.0, False),
        ],
        90,
        path,
    )
    found = tuning.read_tuned(path)
    assert found == {("swiglu", 86): values, ("swiglu", 90): {"BLOCK": 1024, "num_warps": 4}}
    for key, row in found.items():
        monkeypatch.setitem(tuning._TABLE, key, row)
    assert tuning.launch_params("swiglu", 87) == values and tuning.launch_params("swiglu", 80)["BLOCK"] == 2048


def test_measured_rows_are_rows_of_the_table() -> None:
    """Of kernels that there are, with the parameters that these take."""
    rows = json.loads(tuning.TUNED.read_text()) if tuning.TUNED.exists() else {}
    assert set(rows) <= set(tuning.kernels())
    for kernel, cards in rows.items():
        for values in cards.values():
            assert values.keys() == tuning.launch_params(kernel, tuning.CAPABILITIES[-1]).keys()


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert capsys.readouterr().err == "Tuning needs a CUDA card and its driver, and none is available.\n"


@pytest.mark.skipif(not interpreter.is_interpreting(), reason="on a card tuning itself runs")
def test_every_job_runs_and_uses_its_row() -> None:
    """Tiny and interpreted: a row with a parameter missing must be missed by its own job's launches."""
    interpreter.call_device_functions_directly()
    names = []
    for job in tune.jobs(CPU, SIZES):
        card = tuning.capability()
        assert set(job.options) <= set(tuning.launch_params(job.kernel, card)), job.kernel
        job.run()
        with tuning.trying(job.kernel, card, {}), pytest.raises((KeyError, TypeError)):
            job.run()
        names.append(job.kernel)
    assert len(names) == len(set(names)) == 5 + 1 + 4 * 2 + 3
