"""Norm and RoPE of q and k, and K and V into their slots of the paged cache: one launch per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import tuning
from kernels.gpu.tiles import data_pointer, locate, scale_pointer, sincos
from kernels.kv_format import KV_FORMATS
from kernels.reference import paged
from kernels.reference.paged_checks import check_store
from kernels.registry import register

SCHEMA = (
    "(Tensor qkv, Tensor positions, Tensor slot_mapping, Tensor inv_freq, float rope_scale, Tensor? q_norm, "
    "Tensor? k_norm, float norm_eps, Tensor? balance, bool keys_before_rope, str kv_format, int layer, "
    "int blocks_per_extent, Tensor(a!)[] data_extents, Tensor(b!)[] scale_extents, Tensor extent_table, "
    "Tensor(c!) q_out, int sink_position=0, Tensor(d!)? sink_q_out=None) -> ()"
)


@triton.jit
def _round(x):
    """Half to even, for |x| < 2**22; the compiler has no such operation outside CUDA's own library."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _load_heads(
    rows, wanted, norm, eps, cos, sin, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr
):
    """float32 [HEADS, DP] of `rows` (pointers to each head), normed and rotated; sin has its first half negated."""
    channel = tl.arange(0, DP)
    mask = wanted[:, None] & (channel < D)[None, :]
    x = tl.load(rows[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(norm + channel, mask=channel < D, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / D + eps)
        x = x * inverse[:, None] * weight[None, :]
    if ROPE:
        other = (channel + D // 2) % D
        y = tl.load(rows[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            weight = tl.load(norm + other, mask=channel < D, other=0.0).to(tl.float32)
            y = y * inverse[:, None] * weight[None, :]
        x = x * cos[None, :] + y * sin[None, :]
    return x


@triton.jit
def _store_int4(data, scale, row, scale_row, x, wanted, D: tl.constexpr, DP: tl.constexpr, HEADS: tl.constexpr):
    """Groups of 32 channels as 4 bits each, then each group's step, then each group's minimum."""
    GROUPS: tl.constexpr = (D + 31) // 32
    GP: tl.constexpr = (DP + 31) // 32
    GROUP: tl.constexpr = DP // GP
    channel = tl.arange(0, DP)
    grouped = x.reshape(HEADS, GP, GROUP)
    inside = (channel < D).reshape(1, GP, GROUP)
    least = tl.min(tl.where(inside, grouped, float("inf")), 2)
    most = tl.max(tl.where(inside, grouped, float("-inf")), 2)
    group = tl.arange(0, GP)
    known = wanted[:, None] & (group < GROUPS)[None, :]
    # Codes are made with the step and the minimum as they will be read.
    step16 = tl.div_rn(tl.where(known, most - least, 0.0), 15.0).to(tl.float16)
    least16 = tl.where(known, least, 0.0).to(tl.float16)
    pointer = (scale_pointer(scale, "int4") + scale_row * (2 * GROUPS))[:, None] + group[None, :]
    tl.store(pointer, step16, mask=known)
    tl.store(pointer + GROUPS, least16, mask=known)
    step = step16.to(tl.float32)[:, :, None]
    code = tl.div_rn(grouped - least16.to(tl.float32)[:, :, None], tl.where(step > 0.0, step, 1.0))
    code = _round(tl.minimum(tl.maximum(tl.where(step > 0.0, code, 0.0), 0.0), 15.0)).to(tl.int32)
    low, high = tl.split(code.reshape(HEADS, DP // 2, 2))
    byte = tl.arange(0, DP // 2)
    pointer = (data_pointer(data, "int4") + row * (D // 2))[:, None] + byte[None, :]
    tl.store(pointer, (low | (high << 4)).to(tl.uint8), mask=wanted[:, None] & (byte < D // 2)[None, :])


@triton.jit
def _store_rows(data, row, x, wanted, D: tl.constexpr, DP: tl.constexpr, FORMAT: tl.constexpr):
    """x [HEADS, DP] as the format's elements; fp8 saturates."""
    channel = tl.arange(0, DP)
    if FORMAT == "fp8":
        x = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    pointer = (data_pointer(data, FORMAT) + row * D)[:, None] + channel[None, :]
    tl.store(pointer, x.to(pointer.dtype.element_ty), mask=wanted[:, None] & (channel < D)[None, :])


@triton.jit
def _factors(balance, kv_head, wanted, D: tl.constexpr, DP: tl.constexpr):
    """float32 [heads, DP] of the balance constants."""
    channel = tl.arange(0, DP)
    mask = wanted[:, None] & (channel < D)[None, :]
    return tl.load((balance + kv_head * D)[:, None] + channel[None, :], mask=mask, other=1.0)


@triton.jit
def _angles(position, inv_freq, rope_scale, D: tl.constexpr, DP: tl.constexpr):
    """cos and sin [DP] of one token, the first half of sin negated."""
    channel = tl.arange(0, DP)
    frequency = tl.load(inv_freq + channel % (D // 2), mask=channel < D, other=0.0)
    sin, cos = sincos(position.to(tl.float32) * frequency)
    return cos * rope_scale, tl.where(channel < D // 2, -sin, sin) * rope_scale


@triton.jit(do_not_specialize=["layer", "sink_position"])
def store_kv_kernel(
    qkv,
    positions,
    slots,
    inv_freq,
    q_norm,
    k_norm,
    balance,
    extent_table,
    q_out,
    sink_q_out,
    qkv_stride,
    layer,
    sink_position,
    rope_scale,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS_PER_EXTENT: tl.constexpr,
    SCALE_PLANES: tl.constexpr,
    FORMAT: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    BALANCE: tl.constexpr,
    ROTATE_KEYS: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (T, ceil(H / HEADS) + ceil(KV / HEADS)): some query heads, or K and V of some KV heads, of one token."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    GROUP: tl.constexpr = H // KV if H > 0 else 1  # there may be no queries
    channel = tl.arange(0, DP)
    position = tl.load(positions + token)
    cos, sin = _angles(position, inv_freq, rope_scale, D, DP)
    source = qkv + token * qkv_stride
    if part < Q_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        wanted = head < H
        x = _load_heads(source + head * D, wanted, q_norm, eps, cos, sin, D, DP, Q_NORM, True)
        if BALANCE:
            x = x * _factors(balance, head // GROUP, wanted, D, DP)
        place = ((token * H + head) * D)[:, None] + channel[None, :]
        tl.store(q_out + place, x.to(q_out.dtype.element_ty), mask=wanted[:, None] & (channel < D)[None, :])
        if SINKS:
            cos, sin = _angles(tl.minimum(position, sink_position), inv_freq, rope_scale, D, DP)
            x = _load_heads(source + head * D, wanted, q_norm, eps, cos, sin, D, DP, Q_NORM, True)
            if BALANCE:
                x = x * _factors(balance, head // GROUP, wanted, D, DP)
            tl.store(sink_q_out + place, x.to(q_out.dtype.element_ty), mask=wanted[:, None] & (channel < D)[None, :])
    else:
        slot = tl.load(slots + token)
        head = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
        wanted = head < tl.where(slot >= 0, KV, 0)
        slot = tl.maximum(slot, 0)
        k = _load_heads(source + (H + head) * D, wanted, k_norm, eps, cos, sin, D, DP, K_NORM, ROTATE_KEYS)
        v = _load_heads(source + (H + KV + head) * D, wanted, k_norm, eps, cos, sin, D, DP, False, False)
        if BALANCE:
            k = tl.div_rn(k, _factors(balance, head, wanted, D, DP))
        data, scale, row, scale_row = locate(
            slot // BLOCK_SIZE, slot % BLOCK_SIZE, layer, head, extent_table, LAYERS, BLOCK_SIZE, KV, BLOCKS_PER_EXTENT,
            SCALE_PLANES,
        )  # fmt: skip
        if FORMAT == "int4":
            _store_int4(data, scale, row, scale_row, k, wanted, D, DP, HEADS)
            next_plane = scale_row + BLOCK_SIZE * KV
            _store_int4(data, scale, row + BLOCK_SIZE * KV, next_plane, v, wanted, D, DP, HEADS)
        else:
            if FORMAT == "int8":
                step = tl.div_rn(tl.max(tl.maximum(tl.abs(k), tl.abs(v)), 1), 127.0)
                tl.store(scale_pointer(scale, FORMAT) + scale_row, step, mask=wanted)
                divisor = tl.where(step > 0.0, step, 1.0)[:, None]
                k = tl.where(step[:, None] > 0.0, _round(tl.div_rn(k, divisor)), 0.0)
                v = tl.where(step[:, None] > 0.0, _round(tl.div_rn(v, divisor)), 0.0)
            _store_rows(data, row, k, wanted, D, DP, FORMAT)
            _store_rows(data, row + BLOCK_SIZE * KV, v, wanted, D, DP, FORMAT)


def launch_store_kv(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    inv_freq: Tensor,
    rope_scale: float,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    balance: Tensor | None,
    keys_before_rope: bool,
    kv_format: str,
    layer: int,
    blocks_per_extent: int,
    data_extents: Sequence[Tensor],
    scale_extents: Sequence[Tensor],
    extent_table: Tensor,
    q_out: Tensor,
    sink_position: int = 0,
    sink_q_out: Tensor | None = None,
    params: Mapping[str, int] | None = None,
) -> None:
    """Launch the kernel; arguments and errors as `kernels.reference.paged.store_kv` states them.

    Extents are reached through `extent_table`; of the lists only the layout is read. `params` replaces tuned values.
    """
    geometry = check_store(qkv, positions, slot_mapping, inv_freq, kv_format, data_extents, q_out, sink_q_out)
    tuned = {**tuning.launch_params("store_kv", tuning.capability()), **(params or {})}
    tokens, heads, head_dim = q_out.shape
    block_heads = tuned["HEADS"]
    grid = (tokens, triton.cdiv(heads, block_heads) + triton.cdiv(geometry.num_kv_heads, block_heads))
    if tokens == 0:
        return
    store_kv_kernel[grid](
        qkv,
        positions,
        slot_mapping,
        inv_freq,
        q_norm,
        k_norm,
        balance,
        extent_table,
        q_out,
        sink_q_out,
        qkv.stride(0),
        layer,
        sink_position,
        rope_scale,
        norm_eps,
        H=heads,
        KV=geometry.num_kv_heads,
        D=head_dim,
        DP=triton.next_power_of_2(head_dim),
        LAYERS=geometry.num_layers,
        BLOCK_SIZE=geometry.block_size,
        BLOCKS_PER_EXTENT=blocks_per_extent,
        SCALE_PLANES=KV_FORMATS[kv_format].scale_planes,
        FORMAT=kv_format,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        BALANCE=balance is not None,
        ROTATE_KEYS=not keys_before_rope,
        SINKS=sink_q_out is not None,
        HEADS=block_heads,
        num_warps=tuned["num_warps"],
    )


store_kv = register("store_kv", SCHEMA, launch_store_kv, paged.store_kv)
