"""How the CPU kernels are compiled. What that gives is kept (`kernels.cpu.kept`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from numba.core import types

from kernels.cpu import kept

_FOLDER = kept.folder()


def is_supported() -> bool:
    """x86 needs fused multiply-add and float16 conversion in hardware (AVX2 and F16C), ARM has them."""
    features = llvmlite.binding.get_host_cpu_features()
    triple = llvmlite.binding.get_process_triple()
    return triple.startswith(("aarch64", "arm64")) or all(features.get(name) for name in ("avx2", "fma", "f16c"))


# Sums may be reordered; NaN and infinity stay.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}


def compiled(signature: str, from_python: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile for one signature, now, or load what is kept. Compiled callers take a copy of it into themselves.

    Without `from_python` only these can call it: the code that turns Python's numbers into a processor's and back takes
    a sixth of the time that compiling takes.
    """
    options = {**_OPTIONS, "nogil": True, "no_cpython_wrapper": not from_python}
    return _kept(lambda function, cache: numba.njit(signature, cache=cache, **options)(function))


def by_address(arguments: int) -> Callable[[Callable[..., Any]], Any]:
    """As `compiled`, for a function of int64s that returns one and that others call by its `address` (`ir.call_n`).

    A copy in each caller, optimised again with it, took half of the time that compiling takes.
    """
    signature = f"int64({', '.join(['int64'] * arguments)})"
    return _kept(lambda function, cache: numba.cfunc(signature, cache=cache, **_OPTIONS)(function))


def _kept(compile_now: Callable[[Callable[..., Any], bool], Any]) -> Callable[[Callable[..., Any]], Any]:
    """Lets numba keep what it compiles in this module's folder."""

    def wrap(function: Callable[..., Any]) -> Any:
        config: Any = numba.config
        before = config.CACHE_DIR
        if _FOLDER is not None:
            config.CACHE_DIR = str(_FOLDER)
        try:
            return compile_now(function, _FOLDER is not None)
        finally:
            config.CACHE_DIR = before

    return wrap


if os.name == "posix":
    yield_processor = types.ExternalFunction("sched_yield", types.int32())
else:

    @compiled("int32()")
    def yield_processor() -> int:
        """Windows threads just go on looking."""
        return 0
