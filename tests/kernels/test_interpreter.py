"""What the tests' own interpreter settings promise."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.support import interpreter

pytestmark = pytest.mark.skipif(not interpreter.is_interpreting(), reason="kernels are compiled here")


@triton.jit
def _plus(a, b):
    return tl.sum(tl.zeros([4], tl.int32) + a, 0) + b


@triton.jit
def _kernel(x_ptr, out_ptr):
    tl.store(out_ptr, _plus(tl.load(x_ptr), 1) * 4)


@triton.jit
def _masked_kernel(x_ptr, out_ptr):
    at = tl.arange(0, 4)
    tl.store(out_ptr + at, at, mask=(at < 3) & (tl.load(x_ptr) >= 0))


def _run(value: int) -> int:
    x, out = torch.tensor([value], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    _kernel[(1,)](x, out)
    return int(out)


def test_device_functions_are_called_as_before() -> None:
    assert _run(3) == (4 * 3 + 1) * 4


def test_overflow_of_32_bits_is_an_error_where_asked_for() -> None:
    """An offset that wraps reads memory of others on a card; here it would pass unseen."""
    _run(2**28)
    with interpreter.overflow_checks():
        assert _run(3) == 52
        with pytest.raises(InterpreterError, match="overflow"):
            _run(2**28)


def test_a_mask_of_numbers_is_an_error_whatever_the_version() -> None:
    """Triton 3.9 refused a mask that 3.7 took: a comparison of scalars in it had turned it into int64."""
    with pytest.raises(InterpreterError, match="boolean"):
        _masked_kernel[(1,)](torch.ones(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
