"""Compile kernels for any CUDA card without one, through their own launchers.

Only for processes that don't interpret (`TRITON_INTERPRET=0`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

ARCHS = (75, 86, 89, 90, 120)
WARP = 32
REGISTERS_PER_SM = 65536
SHARED_PER_BLOCK = {75: 65536, 86: 101376, 89: 101376, 90: 232448, 120: 101376}
SHARED_PER_SM = {75: 65536, 86: 102400, 89: 102400, 90: 233472, 120: 102400}
"""Bytes: CUDA C++ Programming Guide, technical specifications per compute capability."""
RESERVED_SHARED = 1024
"""Bytes that CUDA keeps per thread block from compute capability 8.0 on."""

_device_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One launch to compile. `run` calls a launcher on CPU tensors; nothing is executed.

    `max_regs` per thread and `max_shared` bytes hold for each kernel that the launcher starts, `wide_loads`, the least
    number of 128-bit global loads, for all of them together. Of `policies`, e.g. "evict_last", some load must carry
    each, in L2 where the card has such and else in L1.
    """

    name: str
    run: Callable[[], None]
    max_regs: int
    wide_loads: int
    max_shared: int
    policies: tuple[str, ...] = ()


def registers_for_two(num_warps: int) -> int:
    """The most registers per thread with which two programs share an SM; given out per warp, 8 a thread at a time."""
    return min(REGISTERS_PER_SM // (2 * num_warps * WARP) // 8 * 8, 255)


def shared_for_two(arch: int) -> int:
    """The most shared memory in bytes with which two programs share an SM."""
    return SHARED_PER_SM[arch] // 2 - (RESERVED_SHARED if arch >= 80 else 0)


class CompileOnlyDriver:
    """`with CompileOnlyDriver(86) as compiled: launcher(cpu_tensors)` compiles each launch and starts nothing.

    Specialisation, launch options and the shared memory limit are those of a real launch on that card.
    """

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.utils = self
        self.built: list[CompiledKernel] = []
        # A new id, so that no kernel comes from the in-memory cache of another driver.
        self._device = next(_device_ids)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, WARP)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_PER_BLOCK[self.arch], "multiprocessor_count": 16, "warpSize": WARP}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, str, int, int, int]:
        return self, name, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None

    def __enter__(self) -> CompileOnlyDriver:
        self._listener = knobs.compilation.listener
        knobs.compilation.listener = self._keep
        driver.set_active(self)
        return self

    def __exit__(self, *exc: object) -> None:
        knobs.compilation.listener = self._listener
        driver._active = None

    def _keep(self, *, src: Any, metadata: dict[str, Any], metadata_group: Any, **ignored: Any) -> None:
        self.built.append(CompiledKernel(src, metadata_group, metadata["hash"]))
