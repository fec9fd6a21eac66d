"""Triton's interpreter, made quick enough for tests. Only for processes that interpret and never compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime import interpreter


def is_interpreting() -> bool:
    """Whether kernels of this process run in the interpreter; settled when Triton was imported."""
    return bool(triton.knobs.runtime.interpret)


def call_device_functions_directly() -> None:
    """Patch `triton.language` once per module of device functions instead of at every call of one.

    A launch patches what its kernel sees, so repeating that inside the launch, at 2 ms a call, only serves modules that
    see other parts of the language (`triton.language.standard`). Those stay patched: nothing is compiled here.
    """
    patched: set[int] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    _set_overflow_checks(False)
    _refuse_masks_that_are_numbers()


def _refuse_masks_that_are_numbers() -> None:
    """A comparison of scalars, broadcast, keeps its operands' type here; from Triton 3.9 on that fails as a mask."""
    builder = interpreter.InterpreterBuilder
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, _with_boolean_mask(getattr(builder, name), place))


def _with_boolean_mask(access: Callable[..., Any], place: int) -> Callable[..., Any]:
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args[place].data.dtype != bool:
            raise TypeError(f"A mask must be boolean, not {args[place].data.dtype}.")
        return access(self, *args, **kwargs)

    return checked


@contextmanager
def overflow_checks() -> Iterator[None]:
    """Inside, 32-bit integer arithmetic of a kernel that overflows raises `InterpreterError`."""
    _set_overflow_checks(True)
    try:
        yield
    finally:
        _set_overflow_checks(False)


def _set_overflow_checks(on: bool) -> None:
    """Stock options compute the checks and drop the result: `debug` is what makes them raise."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=on, debug=on)
