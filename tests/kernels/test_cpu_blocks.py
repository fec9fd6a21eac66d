"""Products over quantised blocks against the same sums in float64, for each format, few rows and many."""

import gguf
import numpy as np
import pytest
import torch

from kernels.dispatch import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels can't be compiled here")

KINDS = ("Q4_0", "Q4_1", "Q8_0")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def from_gguf(kind, rows, columns, seed=0):
    """The matrix, and what its blocks stand for by the reference implementation."""
    from kernels.cpu import blocks as cpu_blocks

    quant = gguf.GGMLQuantizationType[kind]
    data = gguf.quantize(random(rows, columns, seed=seed).numpy(), quant)
    return cpu_blocks.from_file(data, kind, columns), torch.from_numpy(gguf.dequantize(data, quant)).double()


def in_int8(x):
    """What a product reads of x [T, columns]: int8 with a scale per 32."""
    parts = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    largest = parts.abs().amax(-1, keepdim=True)
    codes = (parts * torch.where(largest > 0, 127 / largest, 0.0)).round()
    return (codes * largest / 127).view(len(x), -1)[:, : x.shape[1]].double()


@pytest.mark.parametrize("tokens", [1, 2, 5, 32, 33, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_dequantised_weights(kind, tokens):
    from kernels.cpu import blocks as cpu_blocks

    parts, weights = zip(*(from_gguf(kind, rows, 96, seed) for seed, rows in enumerate((130, 7))), strict=True)
    bias, x = random(137, seed=3), random(tokens, 96, seed=4)
    x[-1, 32:64] = 0
    result = cpu_blocks.BlockLinear(parts, bias)(x)
    expected = in_int8(x) @ torch.cat(weights).T + bias
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-5)
    assert (result - x.double() @ torch.cat(weights).T - bias).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_codes_do_not_overflow(kind):
    """Sums of sixteen bits saturate in silence: all weights and activations at the ends of their ranges."""
    from kernels.cpu import blocks as cpu_blocks

    quant, codes = gguf.GGMLQuantizationType[kind], 16 if kind.startswith("Q4") else 32
    data = gguf.quantize(random(16, 64).numpy(), quant).reshape(16, 2, -1)
    data[:8, :, -codes:], data[8:, :, -codes:] = (0xFF, 0x00) if codes == 16 else (0x80, 0x7F)
    data = data.reshape(16, -1)
    x = torch.full((5, 64), 3.0) * torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])[:, None]
    x[2, ::2] *= -1
    expected = x.double() @ torch.from_numpy(gguf.dequantize(data, quant)).double().T
    result = cpu_blocks.BlockLinear([cpu_blocks.from_file(data, kind, 64)], None)(x)
    torch.testing.assert_close(result.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_activation_shows_in_its_row(bad, tokens):
    from kernels.cpu import blocks as cpu_blocks

    linear, x = cpu_blocks.BlockLinear([from_gguf("Q4_1", 24, 96)[0]], None), random(tokens, 96)
    x[0, 70] = bad
    result = linear(x)
    assert not torch.isfinite(result[0]).any() and torch.isfinite(result[1:]).all()


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("columns", [8, 40, 64, 100])
def test_other_weights_become_int8_of_any_width(columns, tokens):
    from kernels.cpu import blocks as cpu_blocks

    weight, x = random(50, columns), random(tokens, columns, seed=1)
    linear = cpu_blocks.BlockLinear([cpu_blocks.quantise(weight)], None)
    expected = x.double() @ weight.double().T
    bound = x.abs().sum(1, keepdim=True) * weight.abs().max() / 127
    assert ((linear(x) - expected).abs() <= bound).all()
    assert linear(x).double().sub(expected).abs().max() > 0, "an exact result would mean that nothing was quantised"


@pytest.mark.parametrize("factor", [1e-30, 1e-7, 1.0, 1e7, 1e30])
def test_any_range_of_weights_keeps_its_digits(factor):
    """A float16 scale alone would make zero of the small ones and infinity of the large ones."""
    from kernels.cpu import blocks as cpu_blocks

    weight, x = random(32, 64), random(3, 64, seed=1)
    results = [cpu_blocks.BlockLinear([cpu_blocks.quantise(weight * f)], None)(x) for f in (1.0, factor)]
    # Each of the two is at most half a step away from the weights it was made of.
    bound = x.abs().sum(1, keepdim=True) * weight.abs().max() / 127
    assert ((results[1] / factor - results[0]).abs() <= bound).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_weight_shows_in_its_row(bad):
    from kernels.cpu import blocks as cpu_blocks

    weight = random(4, 64)
    weight[2, 5] = bad
    result = cpu_blocks.BlockLinear([cpu_blocks.quantise(weight)], None)(random(1, 64, seed=1))
    assert not torch.isfinite(result[0, 2])


def test_a_row_does_not_depend_on_its_neighbours():
    """Bit for bit: replies must not change with what else is in the batch."""
    from kernels.cpu import blocks as cpu_blocks

    linear, x = cpu_blocks.BlockLinear([from_gguf("Q4_1", 64, 96)[0]], None), random(9, 96)
    x[1:] *= 1e4
    assert torch.equal(linear(x)[:1], linear(x[:1]))


def test_zero_rows_of_int8_stay_zero():
    from kernels.cpu import blocks as cpu_blocks

    weight = random(3, 32)
    weight[1] = 0
    result = cpu_blocks.BlockLinear([cpu_blocks.quantise(weight)], None)(random(2, 32))
    assert (result[:, 1] == 0).all() and (result[:, 0] != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_kept_as_they_are_and_counted(kind):
    from kernels.cpu import blocks as cpu_blocks

    data = gguf.quantize(random(21, 64).numpy(), gguf.GGMLQuantizationType[kind])
    matrix = cpu_blocks.from_file(data, kind, 64)
    assert matrix.panels.nbytes == 24 * data.shape[1]
    chosen = np.array([20, 0, 9, 9, 15])
    assert np.array_equal(matrix.file_rows(chosen), data[chosen])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_for_embeddings_are_those_of_the_file(kind):
    """Bit for bit: layers that are run one by one start from what the file's own rows say."""
    import numba

    from kernels.cpu import blocks as cpu_blocks
    from kernels.cpu import panel_ir

    emitted = getattr(panel_ir, f"row_{kind.lower()}")
    row_of = numba.njit("void(int64, int64, int64, int64)")(lambda a, b, c, d: emitted(a, b, c, d))
    data = gguf.quantize(random(19, 96).numpy(), gguf.GGMLQuantizationType[kind])
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    matrix, out = cpu_blocks.from_file(data, kind, 96), np.zeros(96, np.float32)
    for row in (0, 7, 8, 18):
        row_of(matrix.panels[row // 8].ctypes.data, 3, row % 8, out.ctypes.data)
        assert np.array_equal(out, expected[row])
