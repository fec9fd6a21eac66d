"""`paged_decode` with its reduction: one sequence's keys and values, read once, against what the card can copy.

Peers read keys and values that lie in one piece in 16 bits: torch's `scaled_dot_product_attention`; and, over the same
shuffled blocks as the kernel, plain torch through `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import median, spread
from benchmarks.gpu.timing import Budget, Run, Timer, captured, free_bytes
from benchmarks.roofline import Shape
from engine.memory.plan import human_bytes, kv_bytes_per_token
from kernels.gpu.paged_attention import split_count
from kernels.gpu.paged_decode import newest_tokens, paged_decode, workspace_shapes
from kernels.kv_format import KV_FORMATS, fill_extent_table

BLOCK_SIZE = 16
CONTEXTS = (1024, 8192, 32768, 131072)
GOAL, GOAL_FROM = 0.85, 8192
"""Share of the copy bandwidth, from this context on."""
FP8_CAPABILITY = (8, 9)
PEER_COPIES = 6
"""How many times the cache's size plain torch may take besides it."""
KERNEL_SECONDS, PEERS_SECONDS = 6, 25
AGREES = {"sdpa": 0.02, "compiled": 0.1}
"""Largest error against each peer, as a share of the largest value; plain torch rounds scores to 16 bits."""


def context_bytes(shape: Shape, kv_format: str, context: int) -> int:
    """K and V of one layer's attention over `context` tokens."""
    return kv_bytes_per_token(1, shape.num_kv_heads, shape.head_dim, kv_format) * context


def kv_formats(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Those the device can run, the 16-bit one of `dtype` first."""
    plain = "bf16" if dtype is torch.bfloat16 else "fp16"
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    return (plain, "int8", *(("fp8",) if has_fp8 else ()), "int4")


@dataclass(frozen=True, slots=True)
class Problem:
    """One sequence of `context` tokens in shuffled blocks, and its query."""

    shape: Shape
    kv_format: str
    context: int
    q: Tensor
    data: Tensor
    scales: Tensor | None
    block_table: Tensor
    out: Tensor

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def kernel(self) -> Run:
        """The launch as `kernels.gpu.step` makes it."""
        device, splits = self.q.device, split_count(self.q.device, self.shape.num_kv_heads)
        shapes = workspace_shapes(1, self.shape.num_heads, self.shape.head_dim, splits)
        partials = [torch.empty(one, dtype=torch.float32, device=device) for one in shapes]
        table = torch.zeros(1, 2, dtype=torch.int64, device=device)
        scales = [] if self.scales is None else [self.scales]
        fill_extent_table(table, [self.data], scales)
        lens = torch.tensor([self.context], dtype=torch.int32, device=device)
        where = (self.kv_format, 0, len(self.data), [self.data], scales, table)
        # Asked for at each launch: it is one of the values that are tuned.
        return lambda: paged_decode(
            self.q, self.block_table, lens, self.scale, 0, 0, 0.0, None, 1.0, newest_tokens(), *where, *partials,
            self.out,
        )  # fmt: skip

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """[1, KV, context, D] each, of a format without scales."""
        found = self.data[self.block_table[0].long(), 0].transpose(0, 1).flatten(1, 2)[:, : self.context]
        keys, values = (part.transpose(0, 1)[None].contiguous() for part in found)
        return keys, values


def make_problem(shape: Shape, kv_format: str, context: int, device: torch.device, dtype: torch.dtype) -> Problem:
    fmt, blocks = KV_FORMATS[kv_format], -(-context // BLOCK_SIZE)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    heads = (BLOCK_SIZE, shape.num_kv_heads)
    size = (blocks + 1, 1, 2, *heads, fmt.data_width(shape.head_dim))
    if fmt.has_scales:
        low, high = (0, 256) if fmt.dtype is torch.uint8 else (-127, 128)
        data = torch.randint(low, high, size, generator=generator, device=device, dtype=fmt.dtype)
    else:
        data = normal(*size).to(fmt.dtype)
    scales = None
    if fmt.has_scales:
        one = (blocks + 1, 1, fmt.scale_planes, *heads, fmt.scale_width(shape.head_dim))
        scales = torch.full(one, 1 / 64, dtype=fmt.scale_dtype, device=device)
    table = 1 + torch.randperm(blocks, generator=generator, device=device)[None].int()
    q = normal(1, shape.num_heads, shape.head_dim)
    return Problem(shape, kv_format, context, q, data, scales, table, torch.full_like(q, float("nan")))


def gathered_attention(q: Tensor, data: Tensor, block_table: Tensor, context: int, scale: float) -> Tensor:
    """Plain torch over the same cache: q [1, H, D], data [blocks, 1, 2, block_size, KV, D]."""
    kv_heads = data.shape[4]
    found = data[block_table[0].long(), 0]
    keys, values = (found[:, kind].flatten(0, 1)[:context] for kind in (0, 1))
    grouped = q.view(kv_heads, -1, q.shape[-1])
    scores = torch.einsum("hgd,khd->hgk", grouped, keys).float() * scale
    return torch.einsum("hgk,khd->hgd", scores.softmax(-1).to(q.dtype), values).view(q.shape)


def peers(problem: Problem, compiled: Callable[..., Tensor]) -> dict[str, Callable[[], Tensor]]:
    keys, values = problem.keys_and_values()
    q = problem.q[:, :, None]
    return {
        "sdpa": lambda: F.scaled_dot_product_attention(q, keys, values, scale=problem.scale, enable_gqa=True),
        "compiled": lambda: compiled(problem.q, problem.data, problem.block_table, problem.context, problem.scale),
    }


def error(problem: Problem, expected: Tensor) -> float:
    """Largest difference of the kernel's result, as a share of the largest value."""
    expected = expected.view(problem.q.shape).float()
    return float((problem.out.float() - expected).abs().max() / expected.abs().max())


def rows(
    shapes: tuple[Shape, ...],
    contexts: tuple[int, ...],
    dtype: torch.dtype,
    copy: float,
    timer: Timer,
    budget: Budget,
) -> Iterator[dict[str, Any]]:
    """A row per shape, format and context that fits memory and time; `copy`: bytes per second of the card."""
    compiled = torch.compile(gathered_attention, dynamic=True) if timer.device.type == "cuda" else gathered_attention
    for shape in shapes:
        for kv_format in kv_formats(timer.device, dtype):
            for context in contexts:
                what = f"attention, {shape.name}, {kv_format}, {context}"
                size = context_bytes(shape, kv_format, context)
                plain = KV_FORMATS[kv_format].bits == 16
                free = free_bytes(timer.device)
                if 1.5 * size > free:
                    budget.skip(what, f"takes {human_bytes(1.5 * size)}, {human_bytes(free)} are free")
                elif budget.allows(what, KERNEL_SECONDS):
                    room = plain and (1 + PEER_COPIES) * size < free and budget.allows(f"{what}: peers", PEERS_SECONDS)
                    with budget.noting(what):
                        problem = make_problem(shape, kv_format, context, timer.device, dtype)
                        row = _row(problem, compiled if room else None, copy, timer, budget)
                        del problem  # before the next one is made
                        yield row


def _row(
    problem: Problem, compiled: Callable[..., Tensor] | None, copy: float, timer: Timer, budget: Budget
) -> dict[str, Any]:
    what = f"attention, {problem.shape.name}, {problem.kv_format}, {problem.context}"
    runs = {"kernel": captured(timer.device, problem.kernel())}
    runs["kernel"]()
    errors: dict[str, float] = {}
    for name, run in (peers(problem, compiled) if compiled is not None else {}).items():
        with budget.noting(f"{what}: {name}"):
            errors[name] = error(problem, run())
            runs[name] = captured(timer.device, run)
    found = timer.cold(runs)
    wrong = [name for name, off in errors.items() if not off <= AGREES[name]]
    if wrong or not bool(torch.isfinite(problem.out).all()):
        raise RuntimeError("the kernel's result is wrong, so what it takes means nothing")
    size, kernel_ms = context_bytes(problem.shape, problem.kv_format, problem.context), median(found["kernel"])
    share = size / (kernel_ms * 1e-3) / copy
    return {
        "model": problem.shape.name,
        "kv_format": problem.kv_format,
        "context": problem.context,
        "bytes": size,
        "ms": kernel_ms,
        "ms_spread": spread(found["kernel"]),
        "share": share,
        **{f"{name}_ms": median(found[name]) if name in found else None for name in AGREES},
        **{f"{name}_ms_spread": spread(found[name]) if name in found else None for name in AGREES},
        "error": errors.get("sdpa"),
        "goal": GOAL if problem.context >= GOAL_FROM else None,
        "met": share >= GOAL if problem.context >= GOAL_FROM else None,
    }
