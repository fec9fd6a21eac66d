"""Every kernel as an op that eager code, CUDA graphs and `torch.compile` see alike, and what happens without Triton."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from engine.models.layers import pick_format
from kernels import dispatch
from kernels.gpu import self_test, tuning
from kernels.registry import OPS
from tests.support.interpreter import is_interpreting

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not is_interpreting(), reason="ops are checked where kernels are interpreted")


@pytest.fixture(autouse=True)
def wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs: the interpreter takes its time for each."""
    for name, capability in list(tuning._TABLE):
        if capability == 80 and name.startswith("dequant_ge"):
            monkeypatch.setitem(tuning._TABLE, (name, capability), {**tuning._TABLE[name, capability], "BLOCK_N": 128})


def first_cases() -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for name, arguments, _ in self_test.cases(CPU, torch.float32):
        found.setdefault(name, list(arguments))
    return found


def test_schemas_name_what_is_written() -> None:
    """An argument that is written and not marked would be taken for a constant by whoever compiles the op."""
    cases = first_cases()
    assert cases.keys() == OPS.keys()
    for name, arguments in cases.items():
        op = getattr(torch.ops.kvscope, name).default
        torch.library.opcheck(op, tuple(arguments), test_utils=("test_schema", "test_faketensor"))


def test_compiled_code_holds_the_ops_unbroken() -> None:
    """fullgraph: whatever can't be traced is an error."""
    cases = first_cases()
    x, weight, eps, out = cases["rms_norm"]
    gate_up, gated = cases["swiglu"]

    def run(x: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        torch.ops.kvscope.rms_norm(x, weight, eps, out)
        torch.ops.kvscope.swiglu(gate_up, gated)
        return out + 1, gated * 2

    expected = [tensor.clone() for tensor in run(x, gate_up)]
    out.zero_(), gated.zero_()
    traced = torch.compile(run, fullgraph=True, backend="aot_eager")(x, gate_up)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(traced, expected, strict=True))


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_activations_are_bf16_where_the_card_computes_in_it(
    has_bf16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GTX 1650 emulates bf16, which does not count."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16 or including_emulation
    )
    found = pick_format(torch.device("cuda"), "auto", triton=True)
    assert found.compute_dtype is dtype and found.dtype is dtype and found.blocks and found.planes


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where Triton can't run")
def test_where_triton_can_not_run_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    dispatch.triton_runs_on.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not dispatch.triton_runs_on(torch.device("cuda"))
        assert not dispatch.triton_runs_on(torch.device("cuda"))
    assert [record.getMessage().splitlines() for record in caplog.records] == [[caplog.records[0].getMessage()]]
    assert "torch takes their place" in caplog.text
    dispatch.triton_runs_on.cache_clear()
    assert not dispatch.triton_runs_on(CPU) and dispatch.operations(CPU).name == "reference"
