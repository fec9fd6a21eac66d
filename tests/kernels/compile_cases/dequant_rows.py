"""Launches of `kernels.gpu.dequant_rows` to compile."""

from __future__ import annotations

from functools import partial

import torch

from kernels.gpu.dequant_rows import launch_dequant_rows
from kernels.planes import pack
from tests.support.compile_only import CompileCase
from tests.support.quantised import random_blocks


def cases(arch: int) -> list[CompileCase]:
    weight = pack(random_blocks("Q6_K", 8, 4096), "Q6_K", 4096)
    out = torch.empty(8, 4096, dtype=torch.float16 if arch < 80 else torch.bfloat16)
    run = partial(launch_dequant_rows, weight.planes, "Q6_K", torch.arange(8), out)
    return [CompileCase("Q6_K", run, max_regs=64, wide_loads=1, max_shared=0)]
