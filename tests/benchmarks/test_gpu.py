"""The card's benchmark: its arithmetic by hand, what it chooses, and all of it once, tiny and interpreted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import roofline
from benchmarks.gpu import attention, report, run, steps
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.random_model import SHAPES, TINY, random_model
from benchmarks.gpu.setting import TINY_SETTING, WEIGHTS, Setting
from benchmarks.gpu.timing import Budget, Timer, copy_bandwidth
from tests.support import interpreter

LLAMA = next(shape for shape in SHAPES if shape.name == "Llama-3-8B")
GIB = 2**30


@pytest.fixture
def quick_interpreter() -> None:
    if not interpreter.is_interpreting():
        pytest.skip("on a card the benchmark itself runs")
    interpreter.call_device_functions_directly()


@pytest.mark.parametrize(
    ("kv_format", "per_token"),
    [
        ("fp16", 8 * 128 * 2 * 2),  # K and V of 8 heads of 128 channels, 2 bytes each
        ("int8", 8 * (128 * 2 + 4)),  # one float32 for both
        ("fp8", 8 * 128 * 2),
        ("int4", 8 * (64 * 2 + 2 * 4 * 4)),  # 4 groups of K and of V with two fp16 each
    ],
)
def test_attention_reads_one_layers_cache(kv_format: str, per_token: int) -> None:
    assert attention.context_bytes(LLAMA, kv_format, 8192) == 8192 * per_token


def test_a_step_moves_all_weights_and_the_cache() -> None:
    """The tiny model: a layer of width 256, two heads of 128 over one KV head, 512 tokens, a head of its own."""
    matrices = 256 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 256
    norms, row = 3 * 256, 256
    activations = 2 * (8 * 256 + 3 * 256) + 4 * 512
    cache = 13 * 2 * 128 * 2
    by_hand = 2 * (matrices + 512 * 256 + norms + row) + activations + cache
    assert steps.step_bytes(TINY, "F16", "fp16", 13) == by_hand
    # Q4_0 has 18 bytes for 32 weights, and llama.cpp's files of that name a Q6_K head, 210 for 256.
    quantised = matrices // 32 * 18 + 512 * 210 + 2 * norms + 256 // 32 * 18 + activations + cache
    assert steps.step_bytes(TINY, "Q4_0", "fp16", 13) == quantised


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_random_model_takes_what_the_plan_says(weights: str, quick_interpreter: None) -> None:
    model = random_model(TINY, weights, torch.device("cpu"))
    assert model.weight_bytes == roofline.token_bytes(TINY, weights).held
    plan = steps.memory_plan(TINY, weights, "fp16", 100, 0)
    assert plan.weights == model.weight_bytes and plan.kv_total == (7 + 1) * 16 * 512


def test_shares_are_judged_by_their_goals() -> None:
    """A floor of 8 ms: a step of 10 reaches 80 %, one of 11 doesn't; 4 bits need 70 %, 8 bits nothing."""
    met = steps.judged("F16", 8.0, 10.0, 10.4)
    assert met["share"] == 0.8 and met["met"] and met["host_gap"] == pytest.approx(0.4 / 10.4) and met["host_gap_met"]
    missed = steps.judged("F16", 8.0, 11.0, 12.0)
    assert not missed["met"] and missed["host_gap"] == pytest.approx(1 / 12) and not missed["host_gap_met"]
    assert steps.judged("Q4_0", 8.0, 11.0, 12.0)["met"] and steps.judged("Q8_0", 8.0, 11.0, 12.0)["met"] is None


@pytest.mark.parametrize(
    ("free", "names"),
    [
        (3.6 * GIB, ["Llama-3.2-1B"]),
        (7 * GIB, ["Llama-3-8B", "Llama-3.2-1B", "Qwen2.5-7B"]),
        (0.5 * GIB, []),
    ],
)
def test_shapes_are_those_that_fit(monkeypatch: pytest.MonkeyPatch, free: float, names: list[str]) -> None:
    monkeypatch.setattr(run, "free_bytes", lambda device: int(free))
    budget = Budget(1)
    shapes = run.shapes_that_fit(budget, torch.device("cpu"), Setting())
    assert [shape.name for shape in shapes] == names
    assert len(budget.skipped) == len(SHAPES) - len(names) and all("are free" in reason for reason in budget.skipped)


def test_what_there_is_no_time_for_and_what_fails_is_named() -> None:
    budget = Budget(10)
    assert budget.allows("first", 1) and not budget.part(0.01).allows("second", 1)
    with budget.noting("third"):
        raise RuntimeError("out of\nmemory")
    assert budget.skipped == ["second: no time left", "third: out of memory"]


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.err == "This benchmark needs a CUDA card and its driver, and none is available.\n" and not said.out


def test_goals_stand_beside_shares() -> None:
    assert report.verdict(0.91, 0.85, True) == "91.0 %, goal 85 %: met"
    assert report.verdict(0.5, 0.85, False) == "50.0 %, goal 85 %: not met"
    assert report.verdict(0.5, None, None) == "50.0 %"


def test_a_copy_reads_and_writes_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million bytes in half a millisecond are 4 GB/s."""
    monkeypatch.setattr(Timer, "queued", lambda self, run, count: 0.5)
    assert copy_bandwidth(Timer(torch.device("cpu"), 3), 10**6) == [4e9] * 3


def shares(row: dict[str, Any]) -> list[float]:
    return [
        value for key, value in row.items() if key in ("share", "ms", "step_ms", "floor_ms", "tokens_per_s", "bytes")
    ]


def test_all_of_it_tiny(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick_interpreter: None
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["--device", "cpu", "--tiny", "--rounds", "1", "--results", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "gpu" and result["skipped"] == [] and result["copy_bytes_per_s"] > 0
    assert [row["kv_format"] for row in result["attention"]] == ["fp16", "int8", "fp8", "int4"]
    assert [row["weights"] for row in result["steps"]] == list(TINY_SETTING.weights)
    for row in result["attention"] + result["steps"]:
        values = shares(row)
        assert len(values) >= 3 and all(math.isfinite(value) and value > 0 for value in values), row
    first = result["attention"][0]
    assert first["sdpa_ms"] > 0 and first["compiled_ms"] > 0 and first["error"] < 0.01
    assert result["steps"][0]["generate_tokens_per_s"] > 0 and result["steps"][0]["interleaved"]
    assert all(0 <= row["host_gap"] < 1 and row["memory"] <= row["memory_plan"] for row in result["steps"])
    kept = list(tmp_path.glob("*.json"))
    assert len(kept) == 1 and kept[0].name.startswith("no-card-interpreted-20")
    assert json.loads(kept[0].read_text()) == result
