"""The quantised formats of `kernels.kv_format` in plain torch: float tensors to what the cache holds, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kv_format import INT4_GROUP, KVFormat

FP8_MAX = 448.0


def quantise_int8(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """keys, values [..., D] -> int8 K, int8 V and their common float32 scale [..., 1], max(|K|, |V|) / 127."""
    keys, values = keys.float(), values.float()
    scale = torch.maximum(keys.abs(), values.abs()).amax(-1, keepdim=True) / 127
    divisor = torch.where(scale > 0, scale, 1.0)

    def code(x: Tensor) -> Tensor:
        return torch.where(scale > 0, (x / divisor).round(), 0.0).to(torch.int8)

    return code(keys), code(values), scale


def dequantise_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """int8 [..., D] and float32 [..., 1] -> float32 [..., D]."""
    return codes.float() * scale


def quantise_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> uint8 [..., D / 2] and fp16 [..., 2 G]: G = ceil(D / 32) steps, then G minima.

    Codes are made with the step and the minimum as stored, in 0..15.
    """
    head_dim = x.shape[-1]
    groups = -(-head_dim // INT4_GROUP)
    filled = torch.full((*x.shape[:-1], groups * INT4_GROUP), float("nan"), device=x.device)
    filled[..., :head_dim] = x.float()
    grouped = filled.unflatten(-1, (groups, INT4_GROUP))
    least = grouped.nan_to_num(float("inf"), float("inf"), float("-inf")).amin(-1)
    most = grouped.nan_to_num(float("-inf"), float("inf"), float("-inf")).amax(-1)
    step, least = ((most - least) / 15).half(), least.half()
    divisor = torch.where(step > 0, step, 1.0).float()[..., None]
    code = ((grouped - least.float()[..., None]) / divisor).clamp(0, 15).round()
    code = torch.where(step[..., None] > 0, code, 0.0).flatten(-2)[..., :head_dim].nan_to_num().to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, torch.cat((step, least), -1)


def dequantise_int4(packed: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., D / 2] and fp16 [..., 2 G] as `quantise_int4` makes them -> float32 [..., D]."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float()
    step, least = scales.float().repeat_interleave(INT4_GROUP, -1).unflatten(-1, (2, -1)).unbind(-2)
    return codes * step[..., : codes.shape[-1]] + least[..., : codes.shape[-1]]


def quantise_fp8(x: Tensor) -> Tensor:
    """x [..., D] -> float8_e4m3fn [..., D], saturating at 448."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def encode(fmt: KVFormat, keys_values: Tensor) -> tuple[Tensor, Tensor | None]:
    """K and V [2, ..., D] as `fmt` keeps them: data [2, ..., data width], scales [planes, ..., scale width] or None."""
    if fmt.name == "int8":
        keys, values, scale = quantise_int8(keys_values[0], keys_values[1])
        return torch.stack((keys, values)), scale[None]
    if fmt.name == "int4":
        return quantise_int4(keys_values)
    return (quantise_fp8(keys_values) if fmt.name == "fp8" else keys_values.to(fmt.dtype)), None


def decode(fmt: KVFormat, data: Tensor, scales: Tensor | None) -> Tensor:
    """The inverse of `encode`: float32 [2, ..., D]."""
    if scales is None:
        return data.float()
    return dequantise_int8(data, scales) if fmt.name == "int8" else dequantise_int4(data, scales)
