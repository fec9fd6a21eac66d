"""A paged cache as large as those of real models: filled without a loop over tokens, poisoned wherever nothing is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv_format import KV_FORMATS, fill_extent_table
from kernels.reference.paged import read_tokens
from tests.support.sizes import DEVICE

BLOCK_SIZE, LAYERS, LAYER = 16, 2, 1


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    size: int


LLAMA_8B, QWEN_7B, SMOL, LLAMA_1B = Heads(32, 8, 128), Heads(28, 4, 128), Heads(9, 3, 64), Heads(32, 8, 64)


class LargeCache:
    """Three extents. `contexts` tokens per row lie in layer `LAYER`, in shuffled blocks; all else is NaN, or has NaN
    for its scale. Without contexts, `room` free slots."""

    def __init__(self, kv_format: str, heads: Heads, contexts: tuple[int, ...] = (), room: int = 0) -> None:
        fmt = KV_FORMATS[kv_format]
        counts = [-(-context // BLOCK_SIZE) for context in contexts]
        blocks = sum(counts) + -(-room // BLOCK_SIZE) + 1
        self.kv_format, self.heads, self.contexts = kv_format, heads, contexts
        self.blocks_per_extent = -(-blocks // 3)
        generator = torch.Generator(DEVICE).manual_seed(5)
        own = (LAYERS, 2, BLOCK_SIZE, heads.kv, fmt.data_width(heads.size))
        scale = (LAYERS, fmt.scale_planes, BLOCK_SIZE, heads.kv, fmt.scale_width(heads.size))
        self.data = [poisoned((self.blocks_per_extent, *own), fmt.dtype) for _ in range(3)]
        self.scales = [poisoned((self.blocks_per_extent, *scale), fmt.scale_dtype) for _ in range(3 * fmt.has_scales)]
        self.order = 1 + torch.randperm(3 * self.blocks_per_extent - 1, generator=generator, device=DEVICE)
        self.tables = torch.zeros(len(contexts), max(counts, default=0), dtype=torch.int32, device=DEVICE)
        first = 0
        for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            ids = self.order[first : first + count]
            self.tables[row, :count] = ids.int()
            self._fill(self.data, ids, context, _values((count, *own[1:]), fmt.dtype, generator))
            if fmt.has_scales:
                steps = torch.rand((count, *scale[1:]), generator=generator, device=DEVICE) / 50 + 0.01
                self._fill(self.scales, ids, context, steps.to(fmt.scale_dtype))
            first += count
        self.extent_table = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
        fill_extent_table(self.extent_table, self.data, self.scales)

    def _fill(self, extents: list[Tensor], ids: Tensor, context: int, values: Tensor) -> None:
        used = context - (len(ids) - 1) * BLOCK_SIZE
        values[-1, :, used:] = poisoned(values[-1, :, used:].shape, values.dtype)
        # fp8 has no indexed writes of its own.
        raw = torch.uint8 if values.dtype.itemsize == 1 else values.dtype
        for index, extent in enumerate(extents):
            here = ids // self.blocks_per_extent == index
            extent.view(raw)[ids[here] % self.blocks_per_extent, LAYER] = values.view(raw)[here]

    @property
    def lens(self) -> Tensor:
        return torch.tensor(self.contexts, dtype=torch.int32, device=DEVICE)

    def where(self) -> tuple[object, ...]:
        """The last input arguments of every op."""
        return self.kv_format, LAYER, self.blocks_per_extent, self.data, self.scales, self.extent_table

    def read(self, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """float32 keys and values [count, KV, D] of a block table's first tokens."""
        return read_tokens(self.kv_format, self.data, self.scales, self.blocks_per_extent, LAYER, table, count)


def poisoned(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    if dtype in (torch.int8, torch.uint8):
        return torch.full(shape, 85, dtype=dtype, device=DEVICE)
    return torch.full(shape, torch.nan, device=DEVICE).to(dtype)


def _values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype in (torch.int8, torch.uint8):
        low, high = (-127, 128) if dtype is torch.int8 else (0, 256)
        return torch.randint(low, high, shape, generator=generator, device=DEVICE, dtype=dtype)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def causal(q: Tensor, keys: Tensor, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """[n, H, D] of q [n, H, D] at the last n positions of keys, values [context, KV, D], computed in `dtype`."""
    count, heads, _ = q.shape
    context, kv_heads, _ = keys.shape
    own = torch.arange(context - count, context, device=q.device)[:, None, None]
    hidden = torch.arange(context, device=q.device) > own
    out = torch.empty_like(q, dtype=dtype)
    group = heads // kv_heads
    for head in range(kv_heads):
        rows = q[:, head * group : (head + 1) * group].to(dtype)
        scores = (rows @ keys[:, head].to(dtype).T * scale).masked_fill(hidden, float("-inf"))
        out[:, head * group : (head + 1) * group] = scores.softmax(-1) @ values[:, head].to(dtype)
    return out
