"""What attention of a step is cut into: the splits of single tokens, and tiles of tokens of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.cpu import records as rec
from kernels.interface import BatchMetadata, PagedStore
from kernels.layer_groups import LayerGroup

Words = np.ndarray[Any, np.dtype[np.int64]]
MANY_SPLITS = 6
MIN_TILE = 8  # new tokens of a sequence from which on they are tiles


@dataclass(frozen=True, slots=True)
class Items:
    """`groups`: the items of each group of layers [n, ITEM_WORDS]. `part_rows` int64 [T]: where a split token's parts
    are put, -1 for tokens in tiles; `split_tokens` of them, each in at most `splits` parts."""

    groups: tuple[Words, ...]
    part_rows: Words
    split_tokens: int
    splits: int


def plan_items(meta: BatchMetadata, store: PagedStore, kv_heads: int, each: int) -> Items:
    """The items of a step; `each` query heads share a KV head. Of tiles the longest come first."""
    part_rows, start = np.full(sum(meta.query_lens), -1, np.int64), 0
    single: list[tuple[int, int]] = []
    tiles: list[tuple[int, int, int]] = []
    size, has_sinks = max(1, rec.TILE_ROWS // each), any(group.sinks for group in store.groups)
    for queries, context in zip(meta.query_lens, meta.context_lens_host, strict=True):
        if queries < MIN_TILE or has_sinks:
            for i in range(queries):
                part_rows[start + i] = len(single)
                single.append((start + i, context - queries + i))
        else:
            tiles += [(start + i, min(size, queries - i), context - queries + i) for i in range(0, queries, size)]
        start += queries
    tiles.sort(key=lambda tile: -tile[2])
    of_tiles = [(t, count, -1, kv, kv + 1) for t, count, _ in tiles for kv in range(kv_heads)]
    groups, most = [], 1
    for group in store.groups:
        spans = [_splits(group, position) for _, position in single]
        # A block holds all heads of a token, so one task reads them all where there are tasks enough for the threads.
        at_once = kv_heads if sum(map(len, spans)) > MANY_SPLITS else 1
        heads = range(0, kv_heads, at_once)
        splits = [
            (t, 1, split, kv, kv + at_once)
            for (t, _), span in zip(single, spans, strict=True)
            for split in span
            for kv in heads
        ]
        groups.append(np.array(of_tiles + splits, np.int64).reshape(-1, rec.ITEM_WORDS))
        most = max([most, *map(len, spans)])
    return Items(tuple(groups), part_rows, len(single), most)


def _splits(group: LayerGroup, position: int) -> range:
    """Of what a query sees: keys are counted by position, without the gap behind sinks where there are such."""
    first = 0 if group.sinks else group.recent_start(position)
    return range(first // rec.SPLIT, (first + group.visible(position) - 1) // rec.SPLIT + 1)


def group_records(meta: BatchMetadata, store: PagedStore, items: Items) -> Words:
    """A record for each group of layers, with addresses inside `meta` and `items`."""
    slots, tables = meta.slot_mapping, meta.block_tables
    records = np.empty((len(store.groups), rec.GROUP_WORDS), np.int64)
    for number, (group, own) in enumerate(zip(store.groups, items.groups, strict=True)):
        window = rec.NO_WINDOW if group.window is None else group.window
        addresses = slots[number].data_ptr(), tables[number].data_ptr()
        sinks = group.sinks if group.window is not None else 0
        records[number] = (*addresses, tables.shape[2], window, sinks, own.ctypes.data, len(own))
    return records
