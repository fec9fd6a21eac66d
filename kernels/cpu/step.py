"""A decoder's layers as records for `decode`, and what a step works in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import kv_ir
from kernels.cpu import records as rec
from kernels.cpu.amx import SPREAD_BYTES
from kernels.cpu.blocks import BlockLinear, BlockMatrix, Words
from kernels.cpu.decode import decode
from kernels.cpu.functions import FUNCTIONS
from kernels.cpu.items import Items, group_records, plan_items
from kernels.cpu.panel_ir import PANEL
from kernels.cpu.slabs import aligned_zeros
from kernels.cpu.team import team
from kernels.interface import BatchMetadata, PagedStore
from kernels.kv_format import KV_FORMATS
from kernels.layer_groups import owners

Floats = np.ndarray[Any, np.dtype[np.float32]]
FEW_TOKENS = 32  # that go through all layers in one call
TOKEN_LAYERS = 1024  # tokens * layers of a call otherwise: some tens of milliseconds, so that a step can be given up
KEPT_BUFFERS = 6
_KINDS = {
    "fp32": kv_ir.FP32,
    "fp16": kv_ir.FP16,
    "bf16": kv_ir.BF16,
    "int8": kv_ir.INT8,
    "fp8": kv_ir.FP8,
    "int4": kv_ir.INT4,
}


@dataclass(frozen=True, slots=True)
class LayerParts:
    """`qkv` holds three matrices, `gate_up` two; norms are float32, those of queries and keys only where used."""

    qkv: BlockLinear
    o: BlockLinear
    gate_up: BlockLinear
    down: BlockLinear
    attn_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    def record(self) -> Words:
        words = np.zeros(rec.LAYER_WORDS, np.int64)
        records = [one for linear in (self.qkv, self.o, self.gate_up, self.down) for one in linear.records()]
        words[: rec.ATTN_NORM] = np.concatenate(records)
        norms = (self.attn_norm, self.mlp_norm, self.q_norm, self.k_norm)
        words[rec.ATTN_NORM :] = [0 if norm is None else norm.data_ptr() for norm in norms]
        return words


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What steps of up to so many tokens work in; `words` is the step's record, complete but for batch and cache."""

    x: Floats
    out: Floats
    words: Words
    others: tuple[np.ndarray[Any, Any], ...]


def place_records(store: PagedStore) -> Words:
    """A record for each layer."""
    first = owners(store.places)
    return np.array([(p.group, p.store, owner) for p, owner in zip(store.places, first, strict=True)], np.int64)


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


class FusedLayers:
    """Steps through all layers in compiled calls. Tensors are float32 and contiguous."""

    def __init__(
        self,
        layers: Sequence[LayerParts],
        norm: Tensor,
        inv_freq: Tensor,
        *,
        heads: int,
        kv_heads: int,
        eps: float,
        rope_scale: float,
        scale: float,
        embedding: BlockMatrix | None = None,
        head: BlockLinear | None = None,
    ) -> None:
        """`scale` multiplies scores, `rope_scale` cos and sin. `embedding` and `head`, of one matrix, where they are in
        blocks too: the first and the last thing of a step is then part of its call."""
        self._layers, self._heads, self._group = tuple(layers), heads, heads // kv_heads
        self._dim, self._hidden, self._inner = 2 * len(inv_freq), layers[0].o.rows, layers[0].down.columns
        self._records = np.stack([layer.record() for layer in layers])
        scalars = np.array([eps, rope_scale, scale], np.float32)
        self._vocabulary = 0 if head is None else head.rows
        ends = np.zeros((2, rec.MATRIX_WORDS), np.int64)
        if embedding is not None:
            ends[0] = embedding.record()
        if head is not None:
            (ends[1],) = head.records()
        self.embeds, self.has_head = embedding is not None, head is not None
        self._alive = (self._layers, self._records, scalars, norm, inv_freq, ends, embedding, head)
        self._model = np.zeros(rec.MODEL_WORDS, np.int64)
        self._model[:] = (
            len(layers),
            self._records.ctypes.data,
            self._hidden,
            heads,
            kv_heads,
            self._dim,
            scalars.ctypes.data,
            inv_freq.data_ptr(),
            norm.data_ptr(),
            FUNCTIONS.ctypes.data,
            ends[0].ctypes.data,
            ends[1].ctypes.data,
        )
        self._buffers: dict[tuple[int, int, int, int], _Buffers] = {}
        self._places: tuple[Any, Words] = ((), np.empty(0, np.int64))

    @property
    def fits(self) -> bool:
        """Whether steps go this way: heads are read eight numbers at a time."""
        return self._dim % 8 == 0

    def __call__(
        self, tokens: Tensor, store: PagedStore, meta: BatchMetadata, between: Callable[[], None] = lambda: None
    ) -> Tensor:
        """`tokens`, int64 [T] ids if `embeds`, else float32 [T, hidden] embeddings -> [T, hidden] after the last norm;
        K and V of the tokens are stored.

        `between` is called now and then in a step of many tokens; what it raises ends the step.
        """
        return self._run(tokens, store, meta, between, None)

    def with_logits(
        self, tokens: Tensor, store: PagedStore, meta: BatchMetadata, rows: Tensor, between: Callable[[], None]
    ) -> tuple[Tensor, Tensor]:
        """As the call, and logits float32 [N, vocabulary] of the tokens at int64 rows [N]; only if `has_head`."""
        logits = torch.empty(len(rows), self._vocabulary)
        return self._run(tokens, store, meta, between, (rows, logits)), logits

    def _run(
        self,
        tokens: Tensor,
        store: PagedStore,
        meta: BatchMetadata,
        between: Callable[[], None],
        wanted: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        count, layers = len(tokens), len(self._layers)
        items = plan_items(meta, store, self._heads // self._group, self._group)
        buffers = self._take(count, items.split_tokens, items.splits, len(store.groups))
        step, alive = self._record(buffers, items, store, meta)
        if self.embeds:
            step[rec.TOKEN_IDS] = tokens.data_ptr()
        else:
            buffers.x[:count] = tokens.numpy()
        if wanted is not None:
            rows, logits = wanted
            step[rec.LOGITS : rec.STEP_WORDS] = logits.data_ptr(), rows.data_ptr(), len(rows)
        at_once = max(1, layers if count <= FEW_TOKENS else TOKEN_LAYERS // count)
        for first in range(0, layers, at_once):
            if first:
                between()
            last = min(first + at_once, layers)
            phases = rec.END_PHASES + (last - first) * rec.PHASES
            team().run(decode, phases, (step.ctypes.data, first, last), (alive, tokens, wanted))
        return torch.from_numpy(buffers.out[:count].copy())

    def _record(
        self, buffers: _Buffers, items: Items, store: PagedStore, meta: BatchMetadata
    ) -> tuple[Words, tuple[Any, ...]]:
        """The step's record, and what its addresses point into."""
        sample, lengths = store.extents[0], meta.query_lens
        sequences = np.arange(len(lengths)) if max(lengths) == 1 else np.repeat(np.arange(len(lengths)), lengths)
        extents = np.array([extent.data_ptr() for extent in store.extents], np.int64)
        scales = np.array([extent.data_ptr() for extent in store.scale_extents], np.int64)
        groups, places = group_records(meta, store, items), self._places_of(store)
        step = buffers.words.copy()
        step[rec.TOKENS] = len(sequences)
        step[rec.POSITIONS : rec.PLACES + 1] = (
            meta.positions.data_ptr(),
            sequences.ctypes.data,
            items.part_rows.ctypes.data,
            groups.ctypes.data,
            len(groups),
            places.ctypes.data,
        )
        fmt, balance = KV_FORMATS[store.kv_format], store.balance
        step[rec.EXTENTS : rec.BALANCE + 1] = (
            extents.ctypes.data,
            store.blocks_per_extent,
            sample.shape[1],
            sample.shape[3],
            _KINDS[fmt.name],
            fmt.data_width(self._dim) * fmt.dtype.itemsize,
            scales.ctypes.data,
            fmt.scale_planes,
            fmt.scale_width(self._dim) * fmt.scale_dtype.itemsize,
            0 if balance is None else balance.data_ptr(),
        )
        kept = (tuple(store.extents), tuple(store.scale_extents), balance)
        return step, (step, buffers, sequences, items, groups, places, extents, scales, kept, meta, self)

    def _places_of(self, store: PagedStore) -> Words:
        """The store's `place_records`, those of the last one kept."""
        if store.places is not self._places[0]:
            self._places = store.places, place_records(store)
        return self._places[1]

    def _take(self, tokens: int, split_tokens: int, splits: int, groups: int) -> _Buffers:
        """Buffers with room for so much, by doubling; the last few kinds of step keep theirs."""
        key = (_power_of_two(tokens), _power_of_two(split_tokens), _power_of_two(splits), groups)
        kept = self._buffers.pop(key, None) or self._make(*key)
        self._buffers[key] = kept
        while len(self._buffers) > KEPT_BUFFERS:
            del self._buffers[next(iter(self._buffers))]
        return kept

    def _make(self, tokens: int, split_tokens: int, splits: int, groups: int) -> _Buffers:
        wide, tiled = self._heads * self._dim, rec.tiled(tokens)
        x, out = (aligned_zeros((tokens, self._hidden), np.float32) for _ in range(2))
        rows = aligned_zeros((tiled, rec.row_bytes(max(self._hidden, wide))), np.uint8)
        act = aligned_zeros((tiled, rec.row_bytes(self._inner)), np.uint8)
        qkv = aligned_zeros((tokens, self._layers[0].qkv.rows), np.float32)
        attended, sink_q = (aligned_zeros((tokens, self._heads, self._dim), np.float32) for _ in range(2))
        parts = aligned_zeros((split_tokens, self._heads, splits, self._dim + 2), np.float32)
        angles = (1 + groups) * tokens * self._dim
        scratch = aligned_zeros((team().size, rec.padded(angles + self._work(tiled)) + 32), np.float32)
        words = np.zeros(rec.STEP_WORDS, np.int64)
        words[: rec.SINK_Q + 1] = (
            self._model.ctypes.data,
            0,
            x.ctypes.data,
            rows.ctypes.data,
            qkv.ctypes.data,
            qkv.shape[1],
            attended.ctypes.data,
            parts.ctypes.data,
            splits,
            act.ctypes.data,
            out.ctypes.data,
            scratch.ctypes.data,
            scratch.strides[0],
            angles,
            sink_q.ctypes.data,
        )
        return _Buffers(x, out, words, (rows, act, qkv, attended, sink_q, parts, scratch))

    def _work(self, tiled: int) -> int:
        """Floats that the largest task of a thread needs."""
        tall = max(rec.TILE_ROWS, self._group) + 6
        gap, line = rec.padded(self._dim) + rec.PAD, rec.SPLIT + rec.PAD
        widest = rec.padded(max(self._hidden, self._inner, self._heads * self._dim))
        return max(
            self._hidden + 32,
            tiled * (PANEL + 64) + widest // 32 * SPREAD_BYTES // 4,
            rec.RUN_ROOM // 4 + self._heads * rec.SPLIT + rec.UNPACKED_ROWS * self._dim,
            2 * tall * gap
            + tall * line
            + rec.TILE_KEYS * gap
            + self._dim * (rec.TILE_KEYS + rec.PAD)
            + tall * (self._dim + 4),
        )
