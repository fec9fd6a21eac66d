"""Launches of `kernels.gpu.dequant_gemv` to compile."""

from __future__ import annotations

from collections.abc import Sequence
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
    two = [_packed("Q4_K"), _packed("Q6_K")]
    plain_weight = plain(torch.zeros(ROWS, COLUMNS, dtype=dtype))
    return [
        _case("Q8_0", [_packed("Q8_0")], 1, dtype, max_regs=128, wide_loads=6),
        _case("Q4_K", [_packed("Q4_K")], 1, dtype, max_regs=128, wide_loads=8, activation="silu"),
        _case("Q6_K", [_packed("Q6_K")], 1, dtype, max_regs=128, wide_loads=8),
        _case("Q3_K", [_packed("Q3_K")], 1, dtype, max_regs=128, wide_loads=10),
        _case("plain", [plain_weight], 1, dtype, max_regs=128, wide_loads=5),
        _case("rows", [_packed("Q4_K")], 8, dtype, max_regs=255, wide_loads=34),
        # Each part has the loads that it has alone.
        _case("Q3_K and Q5_K", [_packed("Q3_K"), _packed("Q5_K")], 1, dtype, max_regs=128, wide_loads=18),
        _case("rows of two kinds", two, 8, dtype, max_regs=255, wide_loads=68),
        _case(
            "gate and up", [_packed("Q4_K"), _packed("Q6_K")], 1, dtype, max_regs=128, wide_loads=12, activation="gelu"
        ),
    ]


def _packed(kind: str) -> PackedWeight:
    return pack(random_blocks(kind, ROWS, COLUMNS), kind, COLUMNS)


def _case(
    name: str,
    parts: Sequence[PackedWeight],
    rows: int,
    dtype: torch.dtype,
    max_regs: int,
    wide_loads: int,
    activation: str = "",
) -> CompileCase:
    width = ROWS * len(parts) // (2 if activation else 1)
    x, out = torch.empty(rows, COLUMNS, dtype=dtype), torch.empty(rows, width, dtype=dtype)
    planes = [plane for part in parts for plane in part.planes]
    run = partial(launch_dequant_gemv, x, planes, [part.kind for part in parts], None, out, activation, out)
    # Weights are read once a step and leave the cache to others.
    return CompileCase(name, run, max_regs, wide_loads, max_shared=4096, policies=("evict_first",))
