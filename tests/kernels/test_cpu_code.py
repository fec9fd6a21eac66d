"""The machine code of the CPU's inner loops: what they are made of, since tests take no times."""

import platform
import re

import pytest
import torch

from engine.models.registry import load_model
from kernels.dispatch import cpu_kernels
from tests.support.batches import make_cache, make_metadata
from tests.support.tiny_models import save_safetensors, tiny_model

pytestmark = pytest.mark.skipif(
    cpu_kernels() is None or platform.machine().lower() not in ("x86_64", "amd64"),
    reason="the instructions counted are those of x86",
)


def loops(name, arguments):
    """Instructions of each innermost loop of an intrinsic compiled on its own."""
    import numba

    from kernels.cpu import amx, panel_ir, tile_ir

    emitted = next(getattr(module, name) for module in (panel_ir, tile_ir, amx) if hasattr(module, name))
    names = ", ".join(f"a{i}" for i in range(arguments))
    scope = {"emitted": emitted}
    exec(f"def run({names}):\n    emitted({names})", scope)
    compiled = numba.njit(f"void({', '.join(['int64'] * arguments)})")(scope["run"])
    (text,) = compiled.inspect_asm().values()
    body = [line.strip() for line in text.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(body) if re.fullmatch(r"\.L\w+:", line)}
    found = []
    for at, line in enumerate(body):
        jump = re.fullmatch(r"j\w+\s+(\.L\w+)", line)
        start = labels.get(jump[1], at) if jump else at
        inside = [one for one in body[start:at] if one and not one.startswith(".")]
        if start < at and not any(re.match(r"j\w+\s", one) for one in inside):
            found.append(inside)
    return found


def longest(name, arguments):
    return max(loops(name, arguments), key=len)


def products(dots, sums, halves):
    """`dots` products of bytes, of which `sums` can't be added up as they are unless the processor does that itself."""
    from kernels.cpu.panel_ir import HAS_VNNI

    own = {"vpdpbusd": dots} if HAS_VNNI else {"vpmaddubsw": dots, "vpmaddwd": sums}
    return {**own, "vcvtph2ps": halves}


@pytest.mark.parametrize(
    ("name", "arguments", "expected", "most"),
    [
        ("panel_q4_1", 6, lambda: products(8, 1, 2), 60),
        ("panel_q4_0", 6, lambda: products(8, 1, 1), 60),
        ("tile_q4_1", 6, lambda: products(32, 4, 2), 175),
        ("tile_q4_0", 6, lambda: products(32, 4, 1), 175),
        ("panel_q8_0", 6, lambda: products(8, 8, 1), 75),
        ("tile_q8_0", 6, lambda: products(32, 32, 1), 220),
        ("multiply", 8, lambda: {"vfmadd": 12}, 40),
    ],
)
def test_an_inner_loop_multiplies_and_does_little_else(name, arguments, expected, most):
    """A block of 32 columns and eight rows, for one token or four; of `multiply` a row of six by two vectors."""
    loop = longest(name, arguments)
    for mnemonic, count in expected().items():
        unrolled = sum(line.startswith(("{vex}\t" + mnemonic, mnemonic)) for line in loop) / count
        assert unrolled >= 1 and unrolled == int(unrolled), f"{mnemonic}: {unrolled * count:.0f}, not {count}"
    assert len(loop) / unrolled <= most
    spilled = [line for line in loop if "(%rsp" in line or "(%rbp" in line]
    assert len(spilled) / unrolled <= 12, spilled


@pytest.mark.parametrize(("kind", "fmas"), [("q4_0", 32), ("q4_1", 32), ("q8_0", 16)])
def test_tiles_of_whole_numbers_are_multiplied_by_the_tile_unit(kind, fmas):
    """16 tokens by 16 columns of a block: its sums go through memory once and meet their scales there."""
    from kernels.cpu import amx

    if not amx.HAS_AMX:
        pytest.skip("this processor has no tile registers")
    loop = longest(f"square_{kind}", 10)
    (dot,) = {line.split()[0] for line in loop if line.startswith("tdp")}
    assert dot == ("tdpbssd" if kind == "q8_0" else "tdpbsud")
    unrolled = sum(line.startswith(dot) for line in loop)
    for mnemonic, count in (("tilestored", 1), ("vcvtdq2ps", 16), ("vfmadd", fmas)):
        assert sum(line.startswith(mnemonic) for line in loop) == count * unrolled, mnemonic
    assert len(loop) / unrolled <= 100


def test_a_decode_step_is_one_call(monkeypatch, tmp_path):
    """No Python between layers or matrices: one call for all layers and the head."""
    from kernels.cpu import blocks, step

    calls, team = [], step.team()

    class Counting:
        size = team.size

        def run(self, function, *arguments):
            calls.append(function)
            team.run(function, *arguments)

    model = load_model(save_safetensors(tiny_model("llama"), tmp_path / "m"), torch.device("cpu"))
    monkeypatch.setattr(step, "team", Counting)
    monkeypatch.setattr(blocks, "team", Counting)
    cache = make_cache(model)
    for start, count in ((0, 20), (20, 1)):
        calls.clear()
        model.forward(torch.arange(count), cache, make_metadata([(start, count, list(range(1, 20)))], cache=cache))
        assert len(calls) == 1
