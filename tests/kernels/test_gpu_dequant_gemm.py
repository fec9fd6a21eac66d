"""`dequant_gemm` against its reference, and the reference against the gguf package and float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.weights.catalog import ModelSource
from engine.weights.gguf_reader import GGUFSource
from kernels.gpu import dequant_gemm as module
from kernels.gpu.dequant_gemm import dequant_gemm, launch_dequant_gemm, needs_scratch
from kernels.planes import PackedWeight, dequantise, pack, plain
from kernels.reference.quantized import dequant_gemm_out
from tests.support.interpreter import is_interpreting, overflow_checks
from tests.support.quantised import KINDS, gguf_values, random_blocks

BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "STAGES": 1, "num_warps": 4}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if is_interpreting():
        monkeypatch.setattr(module, "launch_params", lambda *_: BLOCKS)
    yield


def device() -> str:
    return "cpu" if is_interpreting() else "cuda"


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    decode_first: bool = False,
    op: Any = dequant_gemm,
) -> Tensor:
    out = torch.full((x.shape[0], weight.rows), float("nan"), dtype=x.dtype, device=x.device)
    scratch = None
    if decode_first or needs_scratch([weight.kind], x.dtype):
        scratch = torch.full((weight.rows, weight.columns), float("nan"), dtype=x.dtype, device=x.device)
    op(x, list(weight.planes), [weight.kind], bias, residual, scratch, out)
    return out


def assert_as_exact_as_torch(x: Tensor, weight: PackedWeight, values: Tensor) -> None:
    """At most twice as far from float64 as the same product in x's dtype in torch, however W is decoded."""
    exact = x.double() @ values.double().T
    allowed = 2 * error(x @ values.to(x.dtype).T, exact) + 1e-6
    for found in (product(x, weight), product(x, weight, decode_first=True), product(x, weight, op=dequant_gemm_out)):
        assert error(found, exact) <= allowed


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_gguf_times_x(kind: str) -> None:
    for n, k, m in ((37, 768, 9), (33, 1536, 21)):
        blocks = random_blocks(kind, n, k)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(n)).to(device(), torch.float16)
        assert_as_exact_as_torch(x, pack(blocks, kind, k).to(device()), gguf_values(blocks, kind).to(device()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("kind", KINDS)
def test_real_sizes(kind: str) -> None:
    weight = pack(torch.from_numpy(random_blocks(kind, 4099, 3584)).cuda(), kind, 3584)
    for dtype in (torch.float16, torch.bfloat16):
        assert_as_exact_as_torch(torch.randn(300, 3584, device="cuda").to(dtype), weight, dequantise(weight))


@pytest.mark.model
def test_real_weights(default_model: ModelSource) -> None:
    source = GGUFSource(default_model.path)
    for name in ("layers.0.k.weight", "embed.weight"):
        blocks, kind, columns = source.blocks(name)[:64], source.block_format(name), source.shapes()[name][1]
        assert kind is not None
        x = torch.randn(12, columns, generator=torch.Generator().manual_seed(3)).to(device(), torch.float16)
        assert_as_exact_as_torch(x, pack(blocks, kind, columns).to(device()), gguf_values(blocks, kind).to(device()))


@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
@pytest.mark.parametrize("decode_first", [False, True])
def test_bias_and_residual(kind: str, decode_first: bool) -> None:
    n, k, m = 40, 96, 17
    weight = plain(torch.randn(n, k).half().mul_(0.05)) if kind == "F16" else pack(random_blocks(kind, n, k), kind, k)
    weight = weight.to(device())
    x, bias = torch.randn(m, k, device=device()).half(), torch.randn(n, device=device()).half()
    residual = torch.randn(m, n, device=device()).half()
    exact = x.double() @ dequantise(weight).double().T + bias.double() + residual.double()
    for op in (dequant_gemm, dequant_gemm_out):
        found = product(x, weight, bias, residual, decode_first, op)
        # torch rounds the product, the sum and W to float16 one after the other.
        torch.testing.assert_close(found.double(), exact, rtol=2**-9, atol=4e-3)
    in_place = residual.clone()
    scratch = torch.empty(n, k, dtype=torch.float16, device=device()) if decode_first else None
    dequant_gemm(x, list(weight.planes), [weight.kind], bias, in_place, scratch, in_place)
    assert torch.equal(in_place, product(x, weight, bias, residual, decode_first))


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q3_K", "Q4_K", "Q5_K"), ("Q4_1", "Q5_1"), ("Q4_K", "F16")], ids="+".join
)
def test_parts_of_several_kinds_take_one_launch(kinds: tuple[str, ...]) -> None:
    """Parts that end in the middle of a tile."""
    rows, k, m = (40, 9, 33), 512, 18
    blocks = [random_blocks(kind, n, k) if kind != "F16" else None for kind, n in zip(kinds, rows, strict=False)]
    parts = [
        pack(block, kind, k) if block is not None else plain(torch.randn(n, k).half())
        for kind, n, block in zip(kinds, rows, blocks, strict=False)
    ]
    parts = [part.to(device()) for part in parts]
    values = torch.cat([dequantise(part) for part in parts])
    x, bias = torch.randn(m, k, device=device()).half(), torch.randn(len(values), device=device()).half()
    residual, own = torch.randn(m, len(values), device=device()).half(), [part.kind for part in parts]
    planes = [plane for part in parts for plane in part.planes]
    scratch = torch.empty_like(values, dtype=torch.float16) if needs_scratch(own, x.dtype) else None
    assert (scratch is not None) == ("F16" in kinds)
    exact = x.double() @ values.half().double().T + bias.double() + residual.double()
    for op in (dequant_gemm, dequant_gemm_out):
        out = torch.full_like(residual, float("nan"))
        op(x, planes, own, bias, residual, scratch, out)
        torch.testing.assert_close(out.double(), exact, rtol=2**-9, atol=2e-2 if scratch is not None else 4e-3)


def test_float32_is_multiplied_in_full_by_torch() -> None:
    blocks = random_blocks("Q5_K", 16, 256)
    weight, x = pack(blocks, "Q5_K", 256).to(device()), torch.randn(10, 256, device=device())
    assert needs_scratch(["Q5_K"], torch.float32)
    assert_as_exact_as_torch(x, weight, gguf_values(blocks, "Q5_K").to(device()))


def test_plain_weights_of_another_dtype_are_converted_in_the_scratch() -> None:
    values, x = torch.randn(8, 32, device=device()), torch.randn(9, 32, device=device()).half()
    assert_as_exact_as_torch(x, plain(values), values)


def test_slices_of_wider_rows() -> None:
    weight = pack(random_blocks("Q4_0", 20, 64), "Q4_0", 64).to(device())
    x_wide = torch.full((11, 96), float("nan"), dtype=torch.float16, device=device())
    x_wide[:, 8:72] = torch.randn(11, 64).half()
    out = torch.full((11, 50), float("nan"), dtype=torch.float16, device=device())
    dequant_gemm(x_wide[:, 8:72], list(weight.planes), ["Q4_0"], None, None, None, out[:, 10:30])
    assert torch.equal(out[:, 10:30], product(x_wide[:, 8:72].contiguous(), weight))
    assert out[:, :10].isnan().all() and out[:, 30:].isnan().all()


@pytest.mark.skipif(not is_interpreting(), reason="chooses another card")
def test_cards_without_matrix_products_in_triton_need_a_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "capability", lambda: 75)
    weight, x = pack(random_blocks("Q4_0", 8, 64), "Q4_0", 64), torch.randn(9, 64).half()
    assert needs_scratch(["Q4_0"], torch.float16) and not needs_scratch(["F16"], torch.float16)
    with pytest.raises(ValueError, match="needs a scratch"):
        launch_dequant_gemm(x, weight.planes, ["Q4_0"], None, None, None, torch.empty(9, 8).half())
    assert product(x, weight).isfinite().all()


@pytest.mark.skipif(not is_interpreting(), reason="checks the interpreter's integers")
def test_index_arithmetic_stays_in_range() -> None:
    with overflow_checks():
        assert product(torch.randn(9, 256).half(), pack(random_blocks("Q6_K", 5, 256), "Q6_K", 256)).isfinite().all()


def test_a_scratch_that_does_not_fit_is_refused() -> None:
    weight, x, out = pack(random_blocks("Q4_0", 8, 64), "Q4_0", 64), torch.randn(9, 64).half(), torch.empty(9, 8).half()
    for scratch in (torch.empty(8, 32).half(), torch.empty(8, 64)):
        with pytest.raises(ValueError, match=r"scratch must be \[8, 64\] of torch.float16"):
            launch_dequant_gemm(x, weight.planes, ["Q4_0"], None, None, scratch, out)
