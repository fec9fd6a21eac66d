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
    return [_case(kind, arch) for kind in ("Q8_0", "Q4_K", "Q6_K", "Q2_K")]


def _case(kind: str, arch: int) -> CompileCase:
    dtype = torch.float16 if arch < 80 else torch.bfloat16
    weight = pack(random_blocks(kind, ROWS, COLUMNS), kind, COLUMNS)
    x, out = torch.zeros(TOKENS, COLUMNS, dtype=dtype), torch.zeros(TOKENS, ROWS, dtype=dtype)
    scratch = torch.empty(ROWS, COLUMNS, dtype=dtype) if arch < 80 else None
    run = partial(launch_dequant_gemm, x, weight.planes, kind, None, out, scratch, out)
    return CompileCase(kind, run, max_regs=160, wide_loads=1 if arch < 80 else 16, max_shared=112 * 1024)
