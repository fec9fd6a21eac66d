"""Launches of `kernels.gpu.ssm_step` to compile: the shape of Mamba-2 2.7B."""

from __future__ import annotations

import torch

from kernels.gpu.ssm_step import launch_ssm_step
from tests.support.compile_only import CompileCase


def cases(arch: int) -> list[CompileCase]:
    def launch() -> None:
        state, heads = torch.empty(1, 80, 64, 128), torch.empty(80)
        x, dt, group = (torch.empty(shape, dtype=torch.float16) for shape in ((1, 80, 64), (1, 80), (1, 1, 128)))
        launch_ssm_step(state, x, dt, heads, group, group, heads, heads, 0.0, 1.0, x)

    return [CompileCase("fp16", launch, max_regs=96, wide_loads=4, max_shared=2048)]
