"""Test bodies that run twice: tiny wherever there is torch, and at the sizes of real models on a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu import tuning
from tests.support.interpreter import is_interpreting

DEVICE = torch.device("cpu" if is_interpreting() else "cuda")
ON_CARD = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"))
TILE = {"BLOCK_N": 128, "BLOCK_K": 8}
PLAIN_TILE = {"BLOCK_N": 128, "BLOCK_K": 512}


def sized(tiny: Any, real: dict[str, Any]) -> list[Any]:
    """Parameters: `tiny` everywhere, each of `real` on a card."""
    return [pytest.param(tiny, id="tiny"), *(pytest.param(size, id=name, marks=ON_CARD) for name, size in real.items())]


def dtypes() -> list[torch.dtype]:
    """16-bit types that the device computes in; the interpreter gets bfloat16 wrong."""
    has_bf16 = not is_interpreting() and torch.cuda.get_device_capability() >= (8, 0)
    return [torch.float16, torch.bfloat16] if has_bf16 else [torch.float16]


def large_tiles() -> Iterator[None]:
    """The body of a fixture. Interpreted programs take their time each, not by what they hold: let them be few."""
    with ExitStack() as stack:
        if is_interpreting():
            card = tuning.capability()
            for kernel in (name for name in tuning.kernels() if name.startswith("dequant_ge")):
                values = tuning.launch_params(kernel, card) | (PLAIN_TILE if "plain" in kernel else TILE)
                stack.enter_context(tuning.trying(kernel, card, values))
        yield


def need_memory(nbytes: float) -> None:
    """Skip a test on a card whose free memory is less."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if free < nbytes:
            pytest.skip(f"needs {nbytes / 2**30:.1f} GiB of the card's memory, {free / 2**30:.1f} are free")


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Made on the device: real sizes take the CPU too long."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def assert_as_good(got: Tensor, same_maths: Tensor, exact: Tensor) -> None:
    """`got` is off from `exact` (float64) by at most twice what torch in the same dtype is, and 1e-6 of the largest."""
    exact = exact.double()
    allowed = 2 * (same_maths.double() - exact).abs().max() + 1e-6 * exact.abs().max()
    error = (got.double() - exact).abs().max()
    assert error <= allowed, f"off by {error:.3g}, allowed are {allowed:.3g}"
