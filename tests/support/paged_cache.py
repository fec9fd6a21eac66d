"""A paged cache in several extents, every slot poisoned, and formulas in float64 that owe nothing to the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kernels.kv_format import INT4_GROUP, KV_FORMATS, fill_extent_table
from tests.support import interpreter

DEVICE = "cpu" if interpreter.is_interpreting() else "cuda"

SHUFFLED = (7, 3, 10, 1, 6, 9, 2, 11, 5, 8, 4)
"""Block ids of three extents of four blocks, none in order; 0 is the null block."""


class PagedCache:
    """Blocks whose data or scales are NaN until something is stored."""

    def __init__(
        self,
        kv_format: str,
        head_dim: int,
        num_kv_heads: int,
        num_layers: int = 2,
        block_size: int = 8,
        extents: int = 3,
        blocks_per_extent: int = 4,
    ) -> None:
        fmt = KV_FORMATS[kv_format]
        self.kv_format, self.head_dim, self.block_size = kv_format, head_dim, block_size
        self.blocks_per_extent = blocks_per_extent
        shape = (blocks_per_extent, num_layers, 2, block_size, num_kv_heads, fmt.data_width(head_dim))
        scale_shape = (*shape[:2], fmt.scale_planes, *shape[3:5], fmt.scale_width(head_dim))
        self.data = [_poisoned(shape, fmt.dtype) for _ in range(extents)]
        self.scales = [_poisoned(scale_shape, fmt.scale_dtype) for _ in range(extents)] if fmt.has_scales else []
        self.table = torch.zeros(extents + 2, 2, dtype=torch.int64)
        fill_extent_table(self.table, self.data, self.scales)

    @classmethod
    def vast(cls, kv_format: str, head_dim: int) -> PagedCache:
        """One extent of more than 2**31 elements, 32 layers and 64 slots a block; no page of it is touched."""
        cache = cls(kv_format, head_dim, 1, 1, 64, 1, 1)
        elements = 32 * cache.data[0][0].numel()
        cache.blocks_per_extent = 2**31 // elements + 2

        def grown(extent: Tensor) -> Tensor:
            return torch.empty((cache.blocks_per_extent, 32, *extent.shape[2:]), dtype=extent.dtype)

        cache.data, cache.scales = [grown(cache.data[0])], [grown(extent) for extent in cache.scales]
        fill_extent_table(cache.table, cache.data, cache.scales)
        return cache

    def where(self, layer: int) -> tuple[Any, ...]:
        """The last input arguments of every op."""
        return self.kv_format, layer, self.blocks_per_extent, self.data, self.scales, self.table

    def slot(self, layer: int, block: int, offset: int) -> tuple[Tensor, Tensor | None]:
        """data [2, KV, width] and scales [planes, KV, scale_width] of one slot."""
        extent, local = divmod(block, self.blocks_per_extent)
        scales = self.scales[extent][local, layer, :, offset] if self.scales else None
        return self.data[extent][local, layer, :, offset], scales

    def write(self, layer: int, block_table: list[int], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys, values [n, KV, D] from position 0 on; float64 of what the slots hold now."""
        stored = []
        for position, (k, v) in enumerate(zip(keys, values, strict=True)):
            block = block_table[position // self.block_size]
            data, scales = self.slot(layer, block, position % self.block_size)
            stored.append(encode(self.kv_format, k, v, data, scales))
        return torch.stack([k for k, _ in stored]), torch.stack([v for _, v in stored])

    def poison(self, layer: int, block_table: list[int], positions: Iterable[int]) -> None:
        """NaN once more, in the data or the scales."""
        for position in positions:
            slot = self.slot(layer, block_table[position // self.block_size], position % self.block_size)
            for part in slot:
                if part is not None and part.is_floating_point():
                    part.fill_(float("nan"))


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype in (torch.int8, torch.uint8):
        return torch.full(shape, 85, dtype=dtype)
    return torch.full(shape, float("nan")).to(dtype)


def encode(kv_format: str, k: Tensor, v: Tensor, data: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Write k, v [KV, D] of one token into its slot as the format says; float64 of what it stands for."""
    k, v = k.double(), v.double()
    if scales is None:
        limit = 448.0 if kv_format == "fp8" else math.inf
        data[0], data[1] = k.clamp(-limit, limit), v.clamp(-limit, limit)
        return data[0].double(), data[1].double()
    if kv_format == "int8":
        step = torch.maximum(k.abs().amax(-1), v.abs().amax(-1)).float() / 127
        scales[0, :, 0] = step
        divisor = torch.where(step == 0, 1, step).double()[:, None]
        data[0], data[1] = (k / divisor).round(), (v / divisor).round()
        return data[0].double() * step[:, None], data[1].double() * step[:, None]
    groups = math.ceil(k.shape[-1] / INT4_GROUP)
    found = []
    for kind, x in enumerate((k, v)):
        values = torch.empty_like(x)
        for head in range(x.shape[0]):
            codes: list[int] = []
            for group in range(groups):
                part = x[head, group * INT4_GROUP : (group + 1) * INT4_GROUP]
                least, step = part.min().half(), ((part.max() - part.min()) / 15).half()
                scales[kind, head, group], scales[kind, head, groups + group] = step, least
                code = ((part - least.double()) / (step.double() or 1)).clamp(0, 15).round()
                values[head, group * INT4_GROUP : (group + 1) * INT4_GROUP] = code * step.double() + least.double()
                codes += code.int().tolist()
            data[kind, head] = torch.tensor([a + 16 * b for a, b in zip(codes[0::2], codes[1::2], strict=True)])
        found.append(values)
    return found[0], found[1]


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    """float64 x [T, n, D] turned by rotate-half; the angle is rounded to float32 as in models."""
    angle = (positions.float()[:, None] * inv_freq).double()[:, None]
    half = x.shape[-1] // 2
    a, b = x[..., :half].double(), x[..., half:].double()
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    dtype: torch.dtype,
    window: int = 0,
    sinks: int = 0,
    soft_cap: float = 0.0,
    sink_q: Tensor | None = None,
) -> Tensor:
    """[n, H, D] of q [n, H, D] at the last n positions of keys, values [context, KV, D], computed in `dtype`; sinks
    beyond the window are scored by `sink_q`."""
    count, heads, _ = q.shape
    context, kv_heads, _ = keys.shape
    q, keys, values = q.to(dtype), keys.to(dtype), values.to(dtype)
    out = torch.empty_like(q)
    for i in range(count):
        own = context - count + i
        seen = [j for j in range(own + 1) if window == 0 or j > own - window or j < sinks]
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = keys[seen, kv] @ q[i, head] * scale
            if sink_q is not None:
                beyond = torch.tensor([j <= own - window for j in seen])
                scores = torch.where(beyond, keys[seen, kv] @ sink_q[i, head].to(dtype) * scale, scores)
            if soft_cap:
                scores = torch.tanh(scores / soft_cap) * soft_cap
            out[i, head] = scores.softmax(0) @ values[seen, kv]
    return out


def tensors_where_kernels_run() -> Iterator[None]:
    """The body of a fixture: on the CPU where kernels are interpreted, else on the card."""
    with torch.device(DEVICE):
        yield


def checked_integers() -> AbstractContextManager[None]:
    """Interpreted, 32-bit arithmetic that overflows raises."""
    return interpreter.overflow_checks() if interpreter.is_interpreting() else nullcontext()


def can_run(kv_format: str) -> bool:
    """Cards before compute capability 8.9 have no fp8."""
    return kv_format != "fp8" or interpreter.is_interpreting() or torch.cuda.get_device_capability() >= (8, 9)


def random(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every device."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(torch.get_default_device())


def frequencies(head_dim: int) -> Tensor:
    return 1 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)


def assert_as_exact(got: Tensor, same_maths: Tensor, exact: Tensor) -> None:
    """`got` is off by at most twice what plain torch in the same dtype is off, and 1e-6."""
    allowed = 2 * (same_maths.double() - exact).abs().max() + 1e-6
    error = (got.double() - exact).abs().max()
    assert error <= allowed, f"off by {error:.3g}, plain torch by {allowed / 2:.3g}"
