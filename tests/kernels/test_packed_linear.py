"""float16 packed products against float32 over the same rounded weights."""

import pytest
import torch

from kernels import packed_linear

pytestmark = pytest.mark.skipif(not packed_linear.is_available(), reason="this CPU has no FBGEMM")


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_equals_float32_over_rounded_weights(rows, has_bias):
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(70, 40, generator=generator), torch.randn(70, generator=generator)
    x = torch.randn(rows, 40, generator=generator) * 100
    result = packed_linear.PackedLinear(weight, bias if has_bias else None)(x)
    expected = x @ weight.half().float().T + (bias if has_bias else 0)
    torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("factor", [1e-7, 1.0, 1e7])
def test_any_range_of_weights_keeps_its_digits(factor):
    """Unscaled, float16 makes zero of the small ones and clips the large ones."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(32, 64, generator=generator), torch.randn(3, 64, generator=generator)
    bias = torch.randn(32, generator=generator)
    result = packed_linear.PackedLinear(weight * factor, bias * factor)(x)
    torch.testing.assert_close(result / factor, x @ weight.T + bias, atol=0.02, rtol=1e-3)


def test_a_row_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(0)
    linear = packed_linear.PackedLinear(torch.randn(64, 48, generator=generator), None)
    x = torch.randn(9, 48, generator=generator)
    x[1:] *= 1e4
    torch.testing.assert_close(linear(x)[:1], linear(x[:1]), atol=1e-5, rtol=1e-5)


def test_bytes_are_those_of_sixteen_bit_weights():
    assert packed_linear.PackedLinear(torch.zeros(64, 48), None).nbytes == 64 * 48 * 2
