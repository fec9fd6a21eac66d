"""Launches of `kernels.gpu.causal_conv` to compile: the shape of Mamba-2 2.7B."""

from __future__ import annotations

import torch

from kernels.gpu.causal_conv import launch_causal_conv
from tests.support.compile_only import CompileCase


def cases(arch: int) -> list[CompileCase]:
    def launch() -> None:
        state, weight, bias = (torch.empty(n, dtype=torch.float16) for n in ((1, 5376, 3), (5376, 4), (5376,)))
        x = torch.empty(64, 5376, dtype=torch.float16)
        launch_causal_conv(state, torch.empty(2, dtype=torch.int32), x, weight, bias, x)

    return [CompileCase("fp16", launch, max_regs=160, wide_loads=0, max_shared=8192)]
