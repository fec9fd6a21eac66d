"""The check of all kernels at a first start: what passes, what a wrong kernel does, what is remembered."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import triton

from kernels.gpu import self_test, tuning
from kernels.registry import OPS

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="on a card the gpu tests do this")


@pytest.fixture(autouse=True)
def ops_as_they_were(monkeypatch: pytest.MonkeyPatch):
    for name, capability in list(tuning._TABLE):
        if capability == 80 and name.startswith("dequant_ge"):
            monkeypatch.setitem(tuning._TABLE, (name, capability), {**tuning._TABLE[name, capability], "BLOCK_N": 128})
    before = {name: (op.launcher, op.chosen) for name, op in OPS.items()}
    yield
    for name, (launcher, chosen) in before.items():
        OPS[name].launcher, OPS[name].chosen = launcher, chosen


def test_every_kernel_passes_and_the_result_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "new" / "kernels.json"
    assert self_test.check(CPU, torch.float32, kept) == ()
    assert list(json.loads(kept.read_text()).values()) == [[]]


def test_no_kernel_is_left_out() -> None:
    """Copies of blocks, and every format with scales, ran unchecked."""
    checked = list(self_test.cases(CPU, torch.float32))
    assert {name for name, *_ in checked} == set(OPS)
    for name in ("store_kv", "paged_decode", "paged_prefill"):
        asked = [argument for case, arguments, _ in checked if case == name for argument in arguments]
        assert {"fp32", "int8", "int4"} <= {argument for argument in asked if isinstance(argument, str)}


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_a_kernel_that_is_wrong_in_one_format_fails(fmt: str, monkeypatch) -> None:
    right = OPS["paged_decode"].launcher

    def launcher(*arguments) -> None:
        right(*arguments)
        if fmt in arguments:
            arguments[18][0, 0] += 9

    decode = [case for case in self_test.cases(CPU, torch.float32) if case[0] == "paged_decode"]
    assert all(self_test._agrees(*case) for case in decode)
    monkeypatch.setattr(OPS["paged_decode"], "launcher", launcher)
    assert [self_test._agrees(*case) for case in decode] == [fmt not in case[1] for case in decode]


def test_what_a_kernel_makes_of_a_state_is_not_what_the_definition_starts_from(monkeypatch) -> None:
    """A wrong result, a wrong state, and a right kernel, which moves the state on before the definition is asked."""
    step = [case for case in self_test.cases(CPU, torch.float32) if case[0] == "ssm_step"]
    right = OPS["ssm_step"].launcher
    assert len(step) == 2 and all(self_test._agrees(*case) for case in step)
    for wrong in (0, -1):

        def launcher(*arguments, wrong=wrong) -> None:
            right(*arguments)
            arguments[wrong][0, 0] += 9

        monkeypatch.setattr(OPS["ssm_step"], "launcher", launcher)
        assert [self_test._agrees(*case) for case in step] == [wrong == 0, wrong == -1]


def test_a_wrong_kernel_is_replaced_told_of_and_remembered(tmp_path: Path, caplog) -> None:
    kept, right = tmp_path / "kernels.json", OPS["swiglu"].launcher

    def wrong(gate_up: torch.Tensor, out: torch.Tensor) -> None:
        right(gate_up, out)
        out[1, 3] += 1

    OPS["swiglu"].launcher = OPS["swiglu"].chosen = wrong
    only = [case for case in self_test.cases(CPU, torch.float32) if case[0] in ("rms_norm", "swiglu")]
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(self_test, "cases", lambda device, dtype: iter(only))
        assert self_test.check(CPU, torch.float32, kept) == ("swiglu",)
    assert "swiglu" in caplog.text and OPS["swiglu"].chosen is OPS["swiglu"].reference
    OPS["swiglu"].chosen = wrong
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_test, "cases", lambda device, dtype: pytest.fail("this card was checked before"))
        assert self_test.check(CPU, torch.float32, kept) == ("swiglu",)
    assert OPS["swiglu"].chosen is OPS["swiglu"].reference


def test_a_damaged_record_is_made_anew(tmp_path: Path, monkeypatch) -> None:
    kept = tmp_path / "kernels.json"
    kept.write_text("{")
    monkeypatch.setattr(self_test, "cases", lambda device, dtype: iter(()))
    assert self_test.check(CPU, torch.float32, kept) == ()
    assert list(json.loads(kept.read_text()).values()) == [[]]
