"""Launches of `kernels.gpu.dequant_gemv` to compile."""

from __future__ import annotations

from functools import partial

import torch

from kernels.gpu.dequant_gemv import launch_dequant_gemv
from kernels.planes import PackedWeight, pack, plain
from tests.support.compile_only import CompileCase
from tests.support.quantised import random_blocks

ROWS, COLUMNS = 64, 4096


def cases(arch: int) -> list[CompileCase]:
    """128-bit loads: one for the codes of each row of W that a thread holds, and those of x."""
    dtype = torch.float16 if arch < 80 else torch.bfloat16
    plain_weight = plain(torch.zeros(ROWS, COLUMNS, dtype=dtype))
    return [
        _case("Q8_0", _packed("Q8_0"), 1, dtype, max_regs=128, wide_loads=6),
        _case("Q4_K", _packed("Q4_K"), 1, dtype, max_regs=128, wide_loads=8, swiglu=True),
        _case("Q6_K", _packed("Q6_K"), 1, dtype, max_regs=128, wide_loads=8),
        _case("Q3_K", _packed("Q3_K"), 1, dtype, max_regs=128, wide_loads=10),
        _case("plain", plain_weight, 1, dtype, max_regs=128, wide_loads=5),
        _case("rows", _packed("Q4_K"), 8, dtype, max_regs=255, wide_loads=34),
    ]


def _packed(kind: str) -> PackedWeight:
    return pack(random_blocks(kind, ROWS, COLUMNS), kind, COLUMNS)


def _case(
    name: str,
    weight: PackedWeight,
    rows: int,
    dtype: torch.dtype,
    max_regs: int,
    wide_loads: int,
    swiglu: bool = False,
) -> CompileCase:
    x = torch.empty(rows, COLUMNS, dtype=dtype)
    out = torch.empty(rows, ROWS // 2 if swiglu else ROWS, dtype=dtype)
    run = partial(launch_dequant_gemv, x, weight.planes, weight.kind, None, out, swiglu, out)
    return CompileCase(name, run, max_regs, wide_loads, max_shared=4096)
