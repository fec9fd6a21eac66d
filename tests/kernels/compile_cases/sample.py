"""Launches of `kernels.gpu.sample` to compile."""

from __future__ import annotations

import torch

from kernels.gpu.sample import launch_sample, scratch_width
from kernels.reference.sampling import SETTINGS
from tests.support.compile_only import CompileCase

VOCAB = 151936


def cases(arch: int) -> list[CompileCase]:
    def launch() -> None:
        launch_sample(
            torch.empty(1, VOCAB),
            torch.empty(1, len(SETTINGS), dtype=torch.float64),
            torch.empty(4, VOCAB, dtype=torch.bool),
            torch.empty(4, VOCAB, dtype=torch.int32),
            torch.empty(4, VOCAB),
            torch.empty(1, scratch_width(VOCAB), dtype=torch.int64),
            torch.empty(1, dtype=torch.int64),
            False,
        )

    return [CompileCase("qwen vocabulary", launch, max_regs=128, wide_loads=8, max_shared=4096)]
