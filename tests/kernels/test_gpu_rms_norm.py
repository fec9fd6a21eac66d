"""RMSNorm, its residual sum and SwiGLU against their definitions, and those against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.rms_norm import add_rms_norm, launch_rms_norm, rms_norm
from kernels.gpu.swiglu import geglu, launch_swiglu, swiglu
from kernels.reference.normalization import add_rms_norm_out, geglu_out, rms_norm_out, swiglu_out
from tests.support import interpreter

DEVICE = "cpu" if interpreter.is_interpreting() else "cuda"
EPS = 1e-5


def _random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (values * 2).to(dtype).to(DEVICE)


def _assert_as_good(found: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error that torch makes in the same dtype."""
    allowed = 2 * (reference.double() - exact).abs().max().item() + 1e-6
    assert (found.double() - exact).abs().max().item() <= allowed


def _exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 576), (2, 2, 80), (1, 33)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = _random(*shape, dtype=dtype, seed=1), _random(shape[-1], dtype=dtype, seed=2)
    reference, out = torch.empty_like(x), torch.full_like(x, torch.nan)
    rms_norm_out(x, weight, EPS, reference)
    rms_norm(x, weight, EPS, out)
    exact = _exact_norm(x, weight)
    torch.testing.assert_close(reference.double(), exact, atol=4e-3 if dtype == torch.float16 else 1e-5, rtol=2e-3)
    _assert_as_good(out, reference, exact)


def test_heads_inside_a_fused_projection_are_normed_in_place() -> None:
    """q of a fused [q, k, v] row: strides of their own, and what lies beside stays."""
    fused = _random(2, 6, 64, dtype=torch.float16, seed=3)
    weight = _random(64, dtype=torch.float16, seed=4)
    before, expected = fused.clone(), torch.empty(2, 4, 64, dtype=torch.float16, device=DEVICE)
    rms_norm_out(fused[:, :4], weight, EPS, expected)
    rms_norm(fused[:, :4], weight, EPS, fused[:, :4])
    torch.testing.assert_close(fused[:, :4], expected, atol=2e-3, rtol=1e-3)
    assert torch.equal(fused[:, 4:], before[:, 4:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_residual_sum_is_kept_and_normed(dtype: torch.dtype) -> None:
    residual, x = _random(2, 576, dtype=dtype, seed=5), _random(2, 576, dtype=dtype, seed=6)
    weight = _random(576, dtype=dtype, seed=7)
    total, reference = residual.clone(), torch.empty_like(x)
    add_rms_norm_out(total, x, weight, EPS, reference)
    assert torch.equal(total, residual + x)
    out = torch.empty_like(x)
    add_rms_norm(residual, x, weight, EPS, out)
    assert torch.equal(residual, total)
    _assert_as_good(out, reference, _exact_norm(total, weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_swiglu(dtype: torch.dtype) -> None:
    gate_up = _random(2, 2 * 1500, dtype=dtype, seed=8)
    reference = torch.empty(2, 1500, dtype=dtype, device=DEVICE)
    swiglu_out(gate_up, reference)
    out = torch.full_like(reference, torch.nan)
    swiglu(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(reference.double(), exact, atol=1e-5, rtol=1e-3)
    _assert_as_good(out, reference, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_geglu(dtype: torch.dtype) -> None:
    gate_up = _random(2, 2 * 1500, dtype=dtype, seed=9) * 3
    reference = torch.empty(2, 1500, dtype=dtype, device=DEVICE)
    geglu_out(gate_up, reference)
    out = torch.full_like(reference, torch.nan)
    geglu(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    exact = 0.5 * gate * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up
    torch.testing.assert_close(reference.double(), exact, atol=2e-5, rtol=1e-3)
    _assert_as_good(out, reference, exact)


def test_other_shapes_are_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="RMSNorm takes equal"):
        launch_rms_norm(x, weight, EPS, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="adjacent"):
        launch_rms_norm(torch.zeros(8, 2).T, weight, EPS, x)
    with pytest.raises(ValueError, match="SwiGLU takes"):
        launch_swiglu(torch.zeros(2, 8), torch.zeros(2, 8))
