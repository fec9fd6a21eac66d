"""Tiles of the paged cache for attention kernels: where a token's K and V lie, and how each format becomes numbers.

The pool is a set of extents. A kernel finds them through `extent_table`, int64 [extents, 2]: addresses of an extent's
data and of its scales (0 without). Block `b` is block `b % blocks_per_extent` of extent `b // blocks_per_extent`; both
tensors are laid out as `kernels.kv_format` says. A pool that grows changes the table's values and no kernel argument.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sincos(angle):
    """(sin, cos) of float32 angles, in radians, with |angle| < 2**38; within 3e-7 up to 2**17.

    The angle's fraction of a turn is taken in integers: the same bits on every card and interpreted, and no slow path
    that needs a stack. Then Taylor series over an eighth of a turn.
    """
    turns = (angle * 8388608.0 + 0.5).to(tl.int64) * 349985421095  # 2**41 / (2 pi); wraps at whole turns
    turn = (turns >> 32).to(tl.int32)
    quadrant = ((turn >> 29) + 1) >> 1
    x = (turn << 2).to(tl.float32) * 3.657295198167899e-10  # pi / 2 * 2**-32
    y = x * x
    sin = x + x * y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880))))
    cos = 1.0 + y * (-0.5 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320))))
    odd = (quadrant & 1) != 0
    turned_sin = tl.where(odd, cos, sin)
    turned_cos = tl.where(odd, sin, cos)
    turned_sin = tl.where((quadrant & 2) != 0, -turned_sin, turned_sin)
    turned_cos = tl.where(((quadrant + 1) & 2) != 0, -turned_cos, turned_cos)
    return turned_sin, turned_cos


@triton.jit
def data_pointer(address, FORMAT: tl.constexpr):
    """The int64 address of an extent's data as pointers to what `FORMAT` stores; fp8 as bytes."""
    if FORMAT == "fp32":
        pointer = address.to(tl.pointer_type(tl.float32))
    elif FORMAT == "bf16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif FORMAT == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif FORMAT == "int8":
        pointer = address.to(tl.pointer_type(tl.int8))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, 16)


@triton.jit
def scale_pointer(address, FORMAT: tl.constexpr):
    """The int64 address of an extent's scales as pointers: fp16 for int4, float32 for int8."""
    dtype: tl.constexpr = tl.float16 if FORMAT == "int4" else tl.float32
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def locate(
    block,
    offset,
    layer,
    head,
    extent_table,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCKS_PER_EXTENT: tl.constexpr,
    SCALE_PLANES: tl.constexpr,
):
    """(data address, scale address, K row, row in the first scale plane), each int64, of slots `block`, `offset`.

    A row is one head of one token; V's row, and one in the next scale plane, is BLOCK_SIZE * KV_HEADS further.
    """
    entry = extent_table + (block // BLOCKS_PER_EXTENT) * 2
    data = tl.load(entry)
    inner = offset * KV_HEADS + head
    local = (block % BLOCKS_PER_EXTENT).to(tl.int64) * LAYERS + layer
    row = local * (2 * BLOCK_SIZE * KV_HEADS) + inner
    if SCALE_PLANES > 0:
        scale = tl.load(entry + 1)
        scale_row = local * (SCALE_PLANES * BLOCK_SIZE * KV_HEADS) + inner
    else:
        scale = data
        scale_row = row
    return data, scale, row, scale_row


@triton.jit
def load_token_scale(scale, scale_row, valid):
    """float32 [N]: what every channel of an int8 token's K and V is multiplied by."""
    return tl.load(scale_pointer(scale, "int8") + scale_row, mask=valid, other=0.0)


@triton.jit
def load_tile(
    data,
    scale,
    row,
    scale_row,
    valid,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Channels FIRST .. FIRST + COUNT of N rows as [N, WIDTH] of DTYPE, zeros beyond COUNT and where not `valid`.

    int8 comes without its token's scale, which belongs on scores and weights rather than on each channel. `POLICY`: L2.
    """
    if FORMAT == "int4":
        tile = _load_int4(data, scale, row, scale_row, valid, FIRST, COUNT, WIDTH, D, POLICY)
    else:
        channel = tl.arange(0, WIDTH)
        pointer = (data_pointer(data, FORMAT) + row * D)[:, None] + (FIRST + channel)[None, :]
        wanted = valid[:, None]
        if COUNT < WIDTH:
            wanted = wanted & (channel < COUNT)[None, :]
        tile = tl.load(pointer, mask=wanted, other=0, eviction_policy=POLICY)
        if FORMAT == "fp8":
            tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tile.to(DTYPE)


@triton.jit
def _load_int4(
    data,
    scale,
    row,
    scale_row,
    valid,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    POLICY: tl.constexpr,
):
    byte = tl.arange(0, WIDTH // 2)
    wanted = valid[:, None]
    if COUNT < WIDTH:
        wanted = wanted & (byte < COUNT // 2)[None, :]
    pointer = (data_pointer(data, "int4") + row * (D // 2))[:, None] + (FIRST // 2 + byte)[None, :]
    packed = tl.load(pointer, mask=wanted, other=0, eviction_policy=POLICY)
    GROUPS: tl.constexpr = (D + 31) // 32
    scales = (scale_pointer(scale, "int4") + scale_row * (2 * GROUPS))[:, None]
    if FIRST % 32 == 0 and WIDTH % 32 == 0:
        # One load per group, spread in registers; a pointer per channel would be a load per channel.
        ROWS: tl.constexpr = row.shape[0]
        group = FIRST // 32 + tl.arange(0, WIDTH // 32)
        known = valid[:, None] & (group < GROUPS)[None, :]
        step = tl.load(scales + group[None, :], mask=known, other=0.0).to(tl.float32)
        least = tl.load(scales + GROUPS + group[None, :], mask=known, other=0.0).to(tl.float32)
        step = tl.broadcast_to(step[:, :, None], ROWS, WIDTH // 32, 16).reshape(ROWS, WIDTH // 2)
        least = tl.broadcast_to(least[:, :, None], ROWS, WIDTH // 32, 16).reshape(ROWS, WIDTH // 2)
    else:
        group = (FIRST + 2 * byte) // 32
        step = tl.load(scales + group[None, :], mask=wanted, other=0.0).to(tl.float32)
        least = tl.load(scales + GROUPS + group[None, :], mask=wanted, other=0.0).to(tl.float32)
    low = (packed & 15).to(tl.float32) * step + least
    high = (packed >> 4).to(tl.float32) * step + least
    return tl.interleave(tl.where(wanted, low, 0.0), tl.where(wanted, high, 0.0))


@triton.jit
def raw_scores(
    q,
    q_second,
    data,
    scale,
    row,
    scale_row,
    positions,
    valid,
    inv_freq,
    rope_scale,
    D: tl.constexpr,
    DP: tl.constexpr,
    HALF: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROTATE: tl.constexpr,
    USE_DOT: tl.constexpr,
    POLICY: tl.constexpr,
):
    """float32 [M, N]: q [M, DP] times the N keys at `positions`.

    With ROTATE the cache holds keys before RoPE: they are turned by `positions` here, and q comes as its two halves
    `q` and `q_second` [M, HALF].
    """
    if ROTATE:
        channel = tl.arange(0, HALF)
        frequency = tl.load(inv_freq + channel, mask=channel < D // 2, other=0.0)
        sin, cos = sincos(positions.to(tl.float32)[:, None] * frequency[None, :])
        a = load_tile(data, scale, row, scale_row, valid, 0, D // 2, HALF, D, FORMAT, tl.float32, POLICY) * rope_scale
        b = (
            load_tile(data, scale, row, scale_row, valid, D // 2, D // 2, HALF, D, FORMAT, tl.float32, POLICY)
            * rope_scale
        )
        scores = product(q, (a * cos - b * sin).to(DTYPE), USE_DOT)
        scores += product(q_second, (b * cos + a * sin).to(DTYPE), USE_DOT)
    else:
        keys = load_tile(data, scale, row, scale_row, valid, 0, D, DP, D, FORMAT, DTYPE, POLICY)
        scores = product(q, keys, USE_DOT)
    return scores


@triton.jit
def soft_capped(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap)."""
    return soft_cap * (2.0 * tl.sigmoid(scores * (2.0 / soft_cap)) - 1.0)


@triton.jit
def product(a, b, USE_DOT: tl.constexpr):
    """float32 a [M, D] @ b [N, D] transposed; sums of products where there is no tensor core for a dot."""
    return tl.dot(a, tl.trans(b), input_precision="ieee") if USE_DOT else tl.sum(a[:, None, :] * b[None, :, :], 2)


@triton.jit
def weighted_sum(weights, values, USE_DOT: tl.constexpr):
    """float32 weights [M, N] @ values [N, D]; see `product`."""
    if USE_DOT:
        result = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    else:
        result = tl.sum(weights[:, :, None] * values[None, :, :], 1)
    return result
