"""Which implementation of each operation a device gets. Resolved once, when a model is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.interface import BatchMetadata, PagedStore
from kernels.reference import recurrence, ssm

log = logging.getLogger("kvscope.kernels")


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
    plan_attention: Callable[[BatchMetadata, PagedStore, int, int, torch.dtype], Any]
    store_kv: Callable[[Any, int, Tensor], None]
    attention: Callable[[Any, int, Tensor, float, Tensor | None], Tensor]
    copy_blocks: Callable[[Tensor, int, Sequence[Tensor], Sequence[Tensor], Tensor], None]
    geglu: Callable[[Tensor], Tensor] = reference.geglu
    causal_conv: Callable[..., None] = ssm.causal_conv_reference
    ssm_step: Callable[..., None] = ssm.ssm_step_reference
    ssm_chunk: Callable[..., None] = recurrence.ssm_chunk


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
    copy_blocks=reference.copy_blocks_out,
)


def operations(device: torch.device, triton: bool = False) -> Operations:
    """The operations for tensors on `device`; with `triton` those that have kernels run them."""
    if not triton:
        return REFERENCE
    from kernels.gpu import operations as gpu

    return replace(
        REFERENCE,
        name="triton",
        rms_norm=gpu.rms_norm,
        swiglu=gpu.swiglu,
        geglu=gpu.geglu,
        plan_attention=gpu.plan_attention,
        store_kv=gpu.store_kv,
        attention=gpu.attention,
        copy_blocks=gpu.copy_blocks,
        causal_conv=gpu.causal_conv,
        ssm_step=gpu.ssm_step,
        ssm_chunk=gpu.ssm_chunk,
    )


@cache
def triton_runs_on(device: torch.device) -> bool:
    """Whether the Triton kernels can run on a device; False, with one warning, where a card has no working Triton."""
    if device.type != "cuda":
        return False
    try:
        from kernels.gpu.rms_norm import rms_norm

        ones = torch.ones(1, 64, device=device)
        rms_norm(ones, ones[0], 1e-6, torch.empty_like(ones))
        torch.cuda.synchronize(device)
    except Exception as error:  # Triton raises errors of its own, the C compiler's and the driver's
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        log.warning("The Triton kernels can't run (%s); torch takes their place, more slowly.", reason)
        return False
    return True


@cache
def cpu_kernels() -> ModuleType | None:
    """`kernels.cpu.step`, compiled, for models on the CPU; None, with one warning, where it can't be had."""
    try:
        from kernels.cpu import compile as cpu_compile
        from kernels.cpu import kept

        if not cpu_compile.is_supported():
            log.warning("This processor lacks AVX2 and F16C; decoding takes the slower way.")
            return None
        if not kept.is_complete():
            log.warning("Compiling the CPU kernels; this happens once and takes a few seconds.")
        kept.wait_for_children()
        from kernels.cpu import step as cpu_step

        kept.mark_complete()
        return cpu_step
    except Exception as error:  # numba raises errors of its own, LLVM's and the linker's
        log.warning("The CPU kernels can't be compiled (%s); decoding takes the slower way.", type(error).__name__)
        return None


@cache
def row_measures(device: str) -> ModuleType:
    """Functions of `kernels.reference.row_measures` for rows of logits on a type of device."""
    if device != "cpu" or cpu_kernels() is None:
        return reference.row_measures
    from kernels.cpu import row_measures as compiled

    return compiled
