"""Launches of `kernels.gpu.paged_decode` to compile."""

from __future__ import annotations

import torch

from kernels.gpu.paged_decode import launch_paged_decode, workspace_shapes
from tests.support.compile_only import CompileCase
from tests.support.paged_cache import PagedCache

ROWS, HEADS, KV_HEADS, HEAD_DIM, SPLITS = 4, 32, 8, 128, 32
REDUCTION = 16
"""128-bit loads of the second kernel, which each case counts too."""


def cases(arch: int) -> list[CompileCase]:
    dtype, plain = (torch.float16, "fp16") if arch < 80 else (torch.bfloat16, "bf16")
    q = torch.empty(ROWS, HEADS, HEAD_DIM, dtype=dtype)
    tables, contexts = torch.zeros(ROWS, 8, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    workspaces = [torch.empty(shape) for shape in workspace_shapes(*q.shape, SPLITS)]

    def decode(
        kv_format: str, window: int = 0, newest: int = 0, inv_freq: torch.Tensor | None = None, sinks: bool = False
    ) -> None:
        where = PagedCache(kv_format, HEAD_DIM, KV_HEADS, block_size=16).where(0)
        launch_paged_decode(
            q,
            tables,
            contexts,
            0.1,
            window,
            4,
            0.0,
            inv_freq,
            1.0,
            newest,
            *where,
            *workspaces,
            torch.empty_like(q),
            q if sinks else None,
        )

    # On sm_75 tiles small enough for the registers leave a thread 64 bits of int4, and of int8 beside its turned copy.
    narrow = 0 if arch < 80 else 2
    both = ("evict_last", "evict_first")
    # With cp.async a tile of V is copied in the order that the tensor core reads it, 64 bits at a time for int8.
    found = [
        CompileCase(plain, lambda: decode(plain), 152, REDUCTION + 4, 24576),
        CompileCase(f"{plain} hinted", lambda: decode(plain, newest=512), 184, REDUCTION + 8, 24576, both),
        CompileCase("int8 hinted", lambda: decode("int8", newest=512), 184, REDUCTION + 4, 24576, both),
        CompileCase("int4 hinted", lambda: decode("int4", newest=512), 184, REDUCTION + 2 * narrow, 24576, both),
        CompileCase("int8", lambda: decode("int8"), 184, REDUCTION + 2, 20480),
        CompileCase("int8 sinks", lambda: decode("int8", window=1024, sinks=True), 255, REDUCTION + 2, 24576),
        CompileCase(
            "int8 sinks hinted",
            lambda: decode("int8", window=1024, newest=512, sinks=True),
            255,
            REDUCTION + 6,
            24576,
            both,
        ),
        CompileCase("int4", lambda: decode("int4"), 184, REDUCTION + narrow, 20480),
        CompileCase(
            "int8 window rotated",
            lambda: decode("int8", window=4096, inv_freq=torch.empty(64)),
            255,
            REDUCTION + narrow,
            24576,
        ),
    ]
    if arch >= 89:
        found.append(CompileCase("fp8", lambda: decode("fp8"), 184, REDUCTION + 2, 20480))
        found.append(CompileCase("fp8 hinted", lambda: decode("fp8", newest=512), 184, REDUCTION + 4, 20480, both))
    return found
