"""Launches of `kernels.gpu.dequant_gemm` to compile; before compute capability 8.0 it is torch that multiplies."""

from __future__ import annotations

from functools import partial

import torch

from kernels.gpu.dequant_gemm import launch_dequant_gemm
from kernels.planes import pack
from tests.support.compile_only import CompileCase
from tests.support.quantised import random_blocks

ROWS, COLUMNS, TOKENS = 64, 4096, 256


def cases(arch: int) -> list[CompileCase]:
    """A loop's loads are asynchronous copies to shared memory, 128 bits wide for x and codes."""
    return [_case(kinds, arch) for kinds in (["Q8_0"], ["Q4_K"], ["Q6_K"], ["Q2_K"], ["Q4_K", "Q6_K"])]


def _case(kinds: list[str], arch: int) -> CompileCase:
    dtype = torch.float16 if arch < 80 else torch.bfloat16
    planes = [plane for kind in kinds for plane in pack(random_blocks(kind, ROWS, COLUMNS), kind, COLUMNS).planes]
    width = ROWS * len(kinds)
    x, out = torch.zeros(TOKENS, COLUMNS, dtype=dtype), torch.zeros(TOKENS, width, dtype=dtype)
    scratch = torch.empty(width, COLUMNS, dtype=dtype) if arch < 80 else None
    run = partial(launch_dequant_gemm, x, planes, kinds, None, out, scratch, out)
    wide = 1 if arch < 80 else 16
    return CompileCase(" and ".join(kinds), run, max_regs=160, wide_loads=wide * len(kinds), max_shared=112 * 1024)
