"""A decoder's layers as records for `decode`, and the buffers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import kv_ir
from kernels.cpu import records as rec
from kernels.cpu.blocks import MAX_ROWS, BlockLinear, Words, padded_rows
from kernels.cpu.decode import FUNCTIONS, decode
from kernels.cpu.team import team
from kernels.interface import BatchMetadata, PagedStore
from kernels.kv_format import KV_FORMATS
from kernels.layer_groups import owners

Floats = np.ndarray[Any, np.dtype[np.float32]]
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
    """What steps of one size work in; `words` is the step's record, complete but for batch and cache."""

    x: Floats
    out: Floats
    words: Words
    others: tuple[Floats, ...]


def group_records(meta: BatchMetadata, store: PagedStore) -> Words:
    """A record for each group of layers, with addresses inside `meta`."""
    slots, tables = meta.slot_mapping, meta.block_tables
    records = np.empty((len(store.groups), rec.GROUP_WORDS), np.int64)
    for number, group in enumerate(store.groups):
        window = rec.NO_WINDOW if group.window is None else group.window
        addresses = slots[number].data_ptr(), tables[number].data_ptr()
        records[number] = (*addresses, tables.shape[2], window, group.sinks if group.window is not None else 0)
    return records


def place_records(store: PagedStore) -> Words:
    """A record for each layer."""
    first = owners(store.places)
    return np.array([(p.group, p.store, owner) for p, owner in zip(store.places, first, strict=True)], np.int64)


class FusedLayers:
    """All layers in one compiled call, for steps of at most MAX_ROWS tokens. Tensors are float32 and contiguous."""

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
    ) -> None:
        """`scale` multiplies scores, `rope_scale` cos and sin."""
        self._layers, self._heads, self._group = tuple(layers), heads, heads // kv_heads
        self._dim, self._hidden, self._inner = 2 * len(inv_freq), layers[0].o.rows, layers[0].down.columns
        self._records = np.stack([layer.record() for layer in layers])
        scalars = np.array([eps, rope_scale, scale], np.float32)
        self._alive = (self._layers, self._records, scalars, norm, inv_freq)
        self._model = np.zeros(rec.MODEL_WORDS, np.int64)
        self._model[:] = (
            len(layers),
            self._records.ctypes.data,
            self._hidden,
            rec.padded(self._hidden),
            rec.padded(self._inner),
            heads,
            kv_heads,
            self._dim,
            rec.padded(heads * self._dim),
            scalars.ctypes.data,
            inv_freq.data_ptr(),
            norm.data_ptr(),
            FUNCTIONS.ctypes.data,
        )
        self._buffers: dict[tuple[int, int, int], _Buffers] = {}

    def fits(self, tokens: int) -> bool:
        """Whether a step of so many tokens goes this way; heads are read eight numbers at a time."""
        return tokens <= MAX_ROWS and self._dim % 8 == 0

    def __call__(self, embedded: Tensor, store: PagedStore, meta: BatchMetadata) -> Tensor:
        """embedded float32 [T, hidden] -> [T, hidden] after the last norm; K and V of the tokens are stored."""
        count, sample = embedded.shape[0], store.extents[0]
        visible = max(group.visible(max(meta.context_lens_host) - 1) for group in store.groups)
        buffers = self._take(padded_rows(count), -(-visible // rec.SPLIT), len(store.groups))
        buffers.x[:count, : self._hidden] = embedded.numpy()
        sequences = np.repeat(np.arange(len(meta.query_lens)), meta.query_lens)
        extents = np.array([extent.data_ptr() for extent in store.extents], np.int64)
        groups, places = group_records(meta, store), place_records(store)
        step = buffers.words.copy()
        step[rec.TOKENS] = count
        step[rec.POSITIONS : rec.PLACES + 1] = (
            meta.positions.data_ptr(),
            sequences.ctypes.data,
            groups.ctypes.data,
            len(groups),
            places.ctypes.data,
        )
        scales = np.array([extent.data_ptr() for extent in store.scale_extents], np.int64)
        fmt, balance = KV_FORMATS[store.kv_format], store.balance
        step[rec.EXTENTS :] = (
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
        alive = (step, buffers, sequences, groups, places, extents, scales, kept, meta, self)
        team().run(decode, len(self._layers) * rec.PHASES, (step.ctypes.data,), alive)
        return torch.from_numpy(buffers.out[:count, : self._hidden].copy())

    def _take(self, rows: int, splits: int, groups: int) -> _Buffers:
        """Buffers of exactly this many rows; room for splits goes by doubling."""
        splits = 1 << (splits - 1).bit_length()
        kept = self._buffers.get((rows, splits, groups))
        if kept is None:
            for key in [key for key in self._buffers if key[0] == rows]:
                del self._buffers[key]
            kept = self._buffers[rows, splits, groups] = self._make(rows, splits, groups)
        return kept

    def _make(self, rows: int, splits: int, groups: int) -> _Buffers:
        hidden, inner, wide = (rec.padded(n) for n in (self._hidden, self._inner, self._heads * self._dim))
        columns = [part.columns for layer in self._layers[:1] for part in (layer.qkv, layer.o, layer.down)]
        widest = rows * max(hidden, inner, wide)
        sizes = (
            widest,
            widest // 32,
            rows * (max(rec.task_rows(n) for n in columns) + 1),
            self._group * rec.SPLIT + rec.UNPACKED_ROWS * self._dim,
            (1 + groups) * rows * self._dim,
        )
        offsets = np.cumsum((0, *sizes))
        x, out = (np.zeros((rows, hidden), np.float32) for _ in range(2))
        qkv = np.zeros((rows, self._layers[0].qkv.rows), np.float32)
        sink_q = np.zeros((rows, self._heads, self._dim), np.float32)
        parts = np.zeros((rows, self._heads, splits, self._dim + 2), np.float32)
        act = np.zeros((rows, inner), np.float32)
        scratch = np.zeros((team().size, rec.padded(int(offsets[-1])) + 32), np.float32)
        words = np.zeros(rec.STEP_WORDS, np.int64)
        words[: rec.SINK_Q + 1] = (
            self._model.ctypes.data,
            0,
            rows,
            x.ctypes.data,
            qkv.ctypes.data,
            qkv.shape[1],
            parts.ctypes.data,
            splits,
            act.ctypes.data,
            out.ctypes.data,
            scratch.ctypes.data,
            scratch.strides[0],
            *offsets[1:5],
            sink_q.ctypes.data,
        )
        return _Buffers(x, out, words, (qkv, parts, act, scratch, sink_q))
