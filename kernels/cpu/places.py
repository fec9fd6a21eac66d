"""Where K and V lie in the paged cache, and which of them a query sees, for compiled kernels."""

from __future__ import annotations

from kernels.cpu import ir as ir
from kernels.cpu import records as rec
from kernels.cpu.compile import compiled


@compiled("int64(int64)")
def plane_bytes(step: int) -> int:
    """Bytes of the keys of one layer in a block."""
    return (
        ir.word(step, rec.BLOCK_SIZE) * ir.word(ir.word(step, rec.MODEL), rec.KV_HEADS) * ir.word(step, rec.HEAD_BYTES)
    )


@compiled("int64(int64, int64, int64, int64, int64)")
def key_place(step: int, store_index: int, kv_head: int, block: int, offset: int) -> int:
    model, per_extent = ir.word(step, rec.MODEL), ir.word(step, rec.EXTENT_BLOCKS)
    extent = ir.word(ir.word(step, rec.EXTENTS), block // per_extent)
    index = (block % per_extent) * ir.word(step, rec.STORES) + store_index
    row = offset * ir.word(model, rec.KV_HEADS) + kv_head
    return extent + index * 2 * plane_bytes(step) + row * ir.word(step, rec.HEAD_BYTES)


@compiled("int64(int64, int64, int64, int64, int64, int64)")
def scale_place(step: int, store_index: int, plane: int, kv_head: int, block: int, offset: int) -> int:
    """Of the scales of a row; formats with one plane have one scale for K and V."""
    model, per_extent, planes = (
        ir.word(step, rec.MODEL),
        ir.word(step, rec.EXTENT_BLOCKS),
        ir.word(step, rec.SCALE_PLANES),
    )
    extent = ir.word(ir.word(step, rec.SCALE_EXTENTS), block // per_extent)
    index = ((block % per_extent) * ir.word(step, rec.STORES) + store_index) * planes + min(plane, planes - 1)
    row = (index * ir.word(step, rec.BLOCK_SIZE) + offset) * ir.word(model, rec.KV_HEADS) + kv_head
    return extent + row * ir.word(step, rec.SCALE_BYTES)


@compiled("int64(int64, int64)")
def layer_place(step: int, layer: int) -> int:
    return ir.word(step, rec.PLACES) + layer * rec.PLACE_WORDS * 8


@compiled("int64(int64, int64)")
def layer_group(step: int, layer: int) -> int:
    return ir.word(step, rec.GROUPS) + ir.word(layer_place(step, layer), rec.GROUP) * rec.GROUP_WORDS * 8


@compiled("int64(int64, int64, int64)")
def block_table(step: int, layer: int, t: int) -> int:
    """Of the sequence of token `t`."""
    group = layer_group(step, layer)
    return ir.word(group, rec.TABLES) + ir.word(ir.word(step, rec.SEQUENCES), t) * ir.word(group, rec.TABLE_WIDTH) * 4


@compiled("int64(int64, int64)")
def recent_start(group: int, position: int) -> int:
    """The first position that is in the window of a query at `position`."""
    return max(position - ir.word(group, rec.WINDOW) + 1, 0)


@compiled("int64(int64, int64)")
def first_key(group: int, position: int) -> int:
    """The first of the keys that a query at `position` sees. Keys are counted by their positions; where there are
    sinks, without the gap between these and the window."""
    return 0 if ir.word(group, rec.SINKS) else recent_start(group, position)


@compiled("int64(int64, int64)")
def last_key(group: int, position: int) -> int:
    """One past the last of them."""
    recent = recent_start(group, position)
    return min(ir.word(group, rec.SINKS), recent) + position + 1 - recent if ir.word(group, rec.SINKS) else position + 1
