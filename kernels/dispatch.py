"""Which implementation of each operation a device gets. Resolved once, when a model is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.interface import BatchMetadata, PagedStore


@dataclass(frozen=True, slots=True)
class Operations:
    """The table of operations; signatures and meaning are those of `kernels.reference`.

    `plan_attention` prepares a step. What it returns is private to the implementation and goes to `store_kv` and
    `attention` of the same table.
    """

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], None]
    rotary_tables: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    plan_attention: Callable[[BatchMetadata, PagedStore, int, torch.dtype], Any]
    store_kv: Callable[[Any, int, Tensor], None]
    attention: Callable[[Any, int, Tensor, float], Tensor]
    copy_blocks: Callable[[Sequence[Tensor], int, Sequence[tuple[int, int]]], None]


REFERENCE = Operations(
    name="reference",
    rms_norm=reference.rms_norm,
    swiglu=reference.swiglu,
    rotary=reference.rotary,
    rotary_tables=reference.rotary_tables,
    linear=reference.linear,
    plan_attention=reference.plan_attention,
    store_kv=reference.store_kv,
    attention=reference.attention,
    copy_blocks=reference.copy_blocks,
)


def operations(device: torch.device) -> Operations:
    """The operations for tensors on `device`."""
    return REFERENCE
