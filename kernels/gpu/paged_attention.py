"""A step's attention over the paged cache through the Triton kernels: what all its layers share, and a layer's part."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.paged_decode import newest_tokens, paged_decode, workspace_shapes
from kernels.gpu.paged_prefill import paged_prefill
from kernels.gpu.store_kv import store_kv as store_kv_op
from kernels.interface import BatchMetadata, PagedStore
from kernels.layer_groups import LayerGroup, owners

PROGRAMS_PER_SM = 2
MAX_SPLITS = 64


class PagedAttention:
    """Nothing is read back to the host, so a decode step can be captured."""

    def __init__(
        self, meta: BatchMetadata, store: PagedStore, num_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        device, tokens = store.extent_table.device, len(meta.positions)
        self.meta, self._balance, self._places = meta, store.balance, store.places
        self._owners = owners(store.places)
        self._groups = tuple(zip(store.groups, meta.slot_mapping, meta.block_tables, strict=True))
        self._extents = (
            store.blocks_per_extent,
            list(store.extents),
            list(store.scale_extents),
            store.extent_table,
        )
        self._kv_format, self._newest = store.kv_format, newest_tokens()
        self.out = torch.empty(tokens, num_heads, head_dim, dtype=dtype, device=device)
        self._partials: tuple[Tensor, ...] = ()
        if max(meta.query_lens) == 1:
            kv_heads = store.extents[0].shape[4]
            shapes = workspace_shapes(tokens, num_heads, head_dim, split_count(device, tokens * kv_heads))
            self._partials = tuple(torch.empty(one, dtype=torch.float32, device=device) for one in shapes)

    def group(self, index: int) -> LayerGroup:
        return self._groups[self._places[index].group][0]

    def owns(self, index: int) -> bool:
        """Whether layer `index` is the one that stores K and V at its place."""
        return self._owners[index] == index

    def balance(self, index: int) -> Tensor | None:
        """float32 [num_kv_heads, head_dim]: divides the keys that layer `index` reads, and multiplies its queries."""
        return None if self._balance is None else self._balance[self._owners[index]]

    def slots(self, index: int) -> Tensor:
        """int64 [T], negative where another layer stores."""
        own = self._groups[self._places[index].group][1]
        return own if self.owns(index) else torch.full_like(own, -1)

    def cache(self, index: int) -> tuple[object, ...]:
        """The format, the layer's place and the extents, as ops take them."""
        return self._kv_format, self._places[index].store, *self._extents

    def attend(self, index: int, q: Tensor, scale: float, sink_q: Tensor | None) -> Tensor:
        """q [T, H, D], turned and multiplied by the balance -> [T, H * D], valid until the next call."""
        group, _, tables = self._groups[self._places[index].group]
        meta, window, cache = self.meta, group.window or 0, self.cache(index)
        if self._partials:
            paged_decode(
                q, tables, meta.context_lens, scale, window, group.sinks, 0.0, None, 1.0, self._newest, *cache,
                *self._partials, self.out, sink_q,
            )  # fmt: skip
        else:
            paged_prefill(
                q, meta.cu_seqlens_q, tables, meta.context_lens, max(meta.query_lens), scale, window, group.sinks, 0.0,
                None, 1.0, *cache, self.out, sink_q,
            )  # fmt: skip
        return self.out.view(len(self.out), -1)


def plan_attention(
    meta: BatchMetadata, store: PagedStore, num_heads: int, head_dim: int, dtype: torch.dtype
) -> PagedAttention:
    """`Operations.plan_attention` for layers that are run operation by operation."""
    return PagedAttention(meta, store, num_heads, head_dim, dtype)


def store_kv(plan: PagedAttention, index: int, kv: Tensor) -> None:
    """`Operations.store_kv`: kv [T, 2 * KV, D] whose keys are turned, perhaps a part of wider rows.

    To the kernel these are rows without queries, at positions that turn nothing.
    """
    if not plan.owns(index):
        return
    tokens, _, head_dim = kv.shape
    still = torch.zeros(head_dim // 2, dtype=torch.float32, device=kv.device)
    no_queries = kv.new_empty(tokens, 0, head_dim)
    store_kv_op(
        kv.flatten(1), plan.meta.positions, plan.slots(index), still, 1.0, None, None, 0.0, plan.balance(index), False,
        *plan.cache(index), no_queries,
    )  # fmt: skip


def attention(plan: PagedAttention, index: int, q: Tensor, scale: float, sink_q: Tensor | None = None) -> Tensor:
    """`Operations.attention`: q [T, H, D], turned, perhaps a part of wider rows -> [T, H * D]."""
    balance = plan.balance(index)
    if balance is not None:
        factors = balance.repeat_interleave(q.shape[1] // len(balance), 0).to(q.dtype)
        q, sink_q = q * factors, None if sink_q is None else sink_q * factors
    sinks = None if sink_q is None else sink_q.contiguous()
    return plan.attend(index, q.contiguous(), scale, sinks)


def split_count(device: torch.device, programs: int) -> int:
    """Splits of a context so that `programs` (rows times KV heads) fill the card; the same for any context length."""
    if device.type != "cuda":
        return 2
    wanted = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return min(MAX_SPLITS, 1 << max(0, (wanted // programs).bit_length() - 1)) if programs else 1
