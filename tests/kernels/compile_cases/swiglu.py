"""Launches of `kernels.gpu.swiglu` to compile."""

from __future__ import annotations

import torch

from kernels.gpu.swiglu import launch_geglu, launch_swiglu
from tests.support.compile_only import CompileCase


def cases(arch: int) -> list[CompileCase]:
    gate_up, out = torch.empty(8, 2 * 11008, dtype=torch.float16), torch.empty(8, 11008, dtype=torch.float16)
    bounds = {"max_regs": 64, "wide_loads": 2, "max_shared": 0}
    return [
        CompileCase("fp16", lambda: launch_swiglu(gate_up, out), **bounds),
        CompileCase("gelu", lambda: launch_geglu(gate_up, out), **bounds),
    ]
