"""Launches of `kernels.gpu.copy_blocks` to compile."""

from __future__ import annotations

import torch

from kernels.gpu.copy_blocks import launch_copy_blocks
from tests.support.compile_only import CompileCase


def cases(arch: int) -> list[CompileCase]:
    pairs, table = torch.empty(4, 2, dtype=torch.int32), torch.empty(8, 2, dtype=torch.int64)
    data = torch.empty(1, 4, 2, 16, 8, 128, dtype=torch.int8)
    scales = torch.empty(1, 4, 1, 16, 8, 1)
    return [
        CompileCase(
            "int8", lambda: launch_copy_blocks(pairs, 64, [data], [scales], table), 64, wide_loads=16, max_shared=0
        )
    ]
