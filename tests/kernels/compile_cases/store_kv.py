"""Launches of `kernels.gpu.store_kv` to compile."""

from __future__ import annotations

import torch

from kernels.gpu.store_kv import launch_store_kv
from tests.support.compile_only import CompileCase
from tests.support.paged_cache import PagedCache

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 4, 32, 8, 128


def cases(arch: int) -> list[CompileCase]:
    dtype, plain = (torch.float16, "fp16") if arch < 80 else (torch.bfloat16, "bf16")
    qkv = torch.empty(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    q_out = torch.empty(TOKENS, HEADS, HEAD_DIM, dtype=dtype)
    places, inv_freq = torch.zeros(TOKENS, dtype=torch.int64), torch.empty(HEAD_DIM // 2)
    norm = torch.empty(HEAD_DIM, dtype=dtype)

    def store(kv_format: str, weight: torch.Tensor | None, sinks: bool = False) -> None:
        more = (1000, torch.empty_like(q_out)) if sinks else ()
        # As in a real cache: formats with scales have constants, others none.
        balance = torch.ones(KV_HEADS, HEAD_DIM) if kv_format in ("int8", "int4") else None
        kv_format, _, *where = PagedCache(kv_format, HEAD_DIM, KV_HEADS, block_size=16).where(0)
        launch_store_kv(
            qkv, places, places, inv_freq, 1.0, weight, weight, 1e-6, balance, False, kv_format, 3, *where, q_out, *more
        )

    def keys_alone() -> None:
        """As layers that are run one by one store them: turned, and a part of wider rows."""
        where = PagedCache("int8", HEAD_DIM, KV_HEADS, block_size=16).where(0)[2:]
        kv, ones = qkv[:, HEADS * HEAD_DIM :], torch.ones(KV_HEADS, HEAD_DIM)
        none = q_out[:, :0].contiguous()
        launch_store_kv(kv, places, places, inv_freq, 1.0, None, None, 1e-6, ones, False, "int8", 3, *where, none)

    formats = [plain, "int8", "int4"] + (["fp8"] if arch >= 89 else [])
    return [
        CompileCase(name, lambda name=name: store(name, norm if name == plain else None), 128, 3, 1024)
        for name in formats
    ] + [
        CompileCase("int8 sinks", lambda: store("int8", norm, True), 128, 3, 1024),
        CompileCase("keys alone", keys_alone, 128, 3, 1024),
    ]
