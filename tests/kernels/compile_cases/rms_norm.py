"""Launches of `kernels.gpu.rms_norm` to compile."""

from __future__ import annotations

import torch

from kernels.gpu.rms_norm import launch_add_rms_norm, launch_rms_norm
from tests.support.compile_only import CompileCase


def cases(arch: int) -> list[CompileCase]:
    dtype = torch.float16 if arch < 80 else torch.bfloat16
    x, weight = torch.empty(8, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    heads, head_weight = torch.empty(8, 32, 128, dtype=dtype), torch.empty(128, dtype=dtype)
    return [
        CompileCase("residual", lambda: launch_add_rms_norm(x, x, weight, 1e-5, x), 96, wide_loads=3, max_shared=256),
        CompileCase("heads", lambda: launch_rms_norm(heads, head_weight, 1e-5, heads), 48, wide_loads=0, max_shared=0),
    ]
