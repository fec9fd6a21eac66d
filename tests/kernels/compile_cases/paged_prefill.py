"""Launches of `kernels.gpu.paged_prefill` to compile."""

from __future__ import annotations

import torch

from kernels.gpu.paged_prefill import launch_paged_prefill
from tests.support.compile_only import CompileCase
from tests.support.paged_cache import PagedCache

SEQUENCES, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 32, 8, 128


def cases(arch: int) -> list[CompileCase]:
    dtype, plain = (torch.float16, "fp16") if arch < 80 else (torch.bfloat16, "bf16")
    q = torch.empty(TOKENS, HEADS, HEAD_DIM, dtype=dtype)
    tables, contexts = torch.zeros(SEQUENCES, 8, dtype=torch.int32), torch.zeros(SEQUENCES, dtype=torch.int32)
    bounds = torch.zeros(SEQUENCES + 1, dtype=torch.int32)

    def prefill(kv_format: str, window: int = 0, sink_q: torch.Tensor | None = None) -> None:
        where = PagedCache(kv_format, HEAD_DIM, KV_HEADS, block_size=16).where(0)
        launch_paged_prefill(
            q, bounds, tables, contexts, TOKENS, 0.1, window, 4, 0.0, None, 1.0, *where, torch.empty_like(q), sink_q
        )

    formats = [plain, "int8", "int4"] + (["fp8"] if arch >= 89 else [])
    wide = 2 if arch < 80 else 4
    found = [CompileCase(name, lambda name=name: prefill(name), 255, wide, 51200) for name in formats]
    return [*found, CompileCase("int8 sinks", lambda: prefill("int8", 1024, q), 255, wide, 51200)]
