"""Products with quantised weights, norms and SwiGLU at the sizes of real models; tiny where there is no card."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.random_model import random_blocks
from kernels.gpu.dequant_gemm import dequant_gemm, needs_scratch
from kernels.gpu.dequant_gemv import MAX_ROWS, dequant_gemv
from kernels.gpu.dequant_rows import dequant_rows
from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.swiglu import geglu, swiglu
from kernels.planes import PackedWeight, dequantise, pack, plain
from kernels.reference.normalization import add_rms_norm_out, geglu_out, rms_norm_out, swiglu_out
from kernels.reference.quantized import dequant_rows_out
from tests.kernels import build_kernels
from tests.support.quantised import KINDS
from tests.support.sizes import DEVICE, assert_as_good, dtypes, large_tiles, need_memory, normal, sized

EPS = 1e-5
TINY = (70, 512)
MATRICES = {
    "llama-8b-qkv": (6144, 4096),
    "llama-8b-gate-up": (28672, 4096),
    "llama-8b-down": (4096, 14336),
    "qwen-7b-qkv": (4608, 3584),
    "qwen-7b-down": (3584, 18944),
}
HEADS = {"llama-8b-head": (128256, 4096), "qwen-7b-head": (152064, 3584)}
SMOL = {"smollm2-down": (576, 1536), "smollm2-qkv": (960, 576)}
"""Rows of 576 and 1536: the one no multiple of 256, so that only types in blocks of 32 hold them."""
BLOCKS_OF_32 = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "plain")


@pytest.fixture(autouse=True)
def tiles() -> Iterator[None]:
    yield from large_tiles()


def weight(kind: str, size: tuple[int, int], dtype: torch.dtype) -> PackedWeight:
    need_memory(14 * size[0] * size[1])  # also in float32, in x's dtype, and a part in float64
    if kind == "plain":
        return plain(normal(*size, dtype=dtype, seed=1) * size[1] ** -0.5)
    blocks = torch.from_numpy(random_blocks.__wrapped__(kind, *size)).to(DEVICE)
    return pack(blocks, kind, size[1])


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def exact_product(x: Tensor, values: Tensor) -> Tensor:
    """float64 in parts: a head in float64 would take a small card's memory."""
    return torch.cat([x.double() @ part.double().T for part in values.split(8192)], 1)


def check_gemv(kind: str, size: tuple[int, int], rows: int) -> None:
    for dtype in dtypes():
        packed, x = weight(kind, size, dtype), normal(rows, size[1], dtype=dtype)
        values, out = dequantise(packed), nan(rows, size[0], dtype=dtype)
        residual = normal(rows, size[0], dtype=dtype, seed=3)
        dequant_gemv(x, list(packed.planes), [packed.kind], None, residual, "", out)
        same = x @ values.to(dtype).T + residual
        assert_as_good(out, same, exact_product(x, values) + residual.double())


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize("size", sized(TINY, MATRICES))
def test_gemv(kind: str, size: tuple[int, int]) -> None:
    check_gemv(kind, size, 1)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("size", sized(TINY, {name: MATRICES[name] for name in ("llama-8b-down", "qwen-7b-qkv")}))
def test_gemv_of_several_rows(kind: str, rows: int, size: tuple[int, int]) -> None:
    check_gemv(kind, size, rows)


@pytest.mark.parametrize("kind", ["Q6_K", "Q4_0", "plain"])
@pytest.mark.parametrize("size", sized(TINY, HEADS))
def test_heads(kind: str, size: tuple[int, int]) -> None:
    check_gemv(kind, size, 1)


@pytest.mark.parametrize("kind", BLOCKS_OF_32)
@pytest.mark.parametrize("size", sized((70, 96), SMOL))
def test_narrow_matrices(kind: str, size: tuple[int, int]) -> None:
    check_gemv(kind, size, 1)


@pytest.mark.parametrize("kinds", [("Q4_K",), ("Q4_0",), ("plain",), ("Q4_K", "Q6_K")], ids="+".join)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("size", sized(TINY, {"llama-8b": (28672, 4096), "qwen-7b": (37888, 3584)}))
def test_gate_and_up_with_their_activation(kinds: tuple[str, ...], activation: str, size: tuple[int, int]) -> None:
    dtype, half = dtypes()[-1], size[0] // 2
    parts = [weight(kind, (size[0] // len(kinds), size[1]), dtype) for kind in kinds]
    x, values = normal(1, size[1], dtype=dtype), torch.cat([dequantise(part) for part in parts])
    out = nan(1, half, dtype=dtype)
    planes = [plane for part in parts for plane in part.planes]
    dequant_gemv(x, planes, [part.kind for part in parts], None, None, activation, out)
    gate, up = (x @ values.to(dtype).T).chunk(2, -1)
    exact_gate, exact_up = exact_product(x, values).chunk(2, -1)
    act = F.silu if activation == "silu" else partial(F.gelu, approximate="tanh")
    assert_as_good(out, act(gate) * up, act(exact_gate) * exact_up)


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q3_K", "Q5_K"), ("Q4_0", "Q4_1", "Q5_1"), ("Q4_K", "plain")], ids="+".join
)
@pytest.mark.parametrize("rows", [1, 8, 20])
@pytest.mark.parametrize("size", sized((40, 512), {"llama-8b-k": (1024, 4096), "qwen-7b-k": (512, 3584)}))
def test_q_k_and_v_of_several_kinds(kinds: tuple[str, ...], rows: int, size: tuple[int, int]) -> None:
    dtype = dtypes()[-1]
    parts = [weight(kind, (size[0] * (4 if i == 0 else 1), size[1]), dtype) for i, kind in enumerate(kinds)]
    x, values = normal(rows, size[1], dtype=dtype), torch.cat([dequantise(part) for part in parts])
    out = nan(rows, len(values), dtype=dtype)
    planes, own = [plane for part in parts for plane in part.planes], [part.kind for part in parts]
    if rows <= MAX_ROWS:
        dequant_gemv(x, planes, own, None, None, "", out)
    else:
        scratch = nan(*values.shape, dtype=dtype) if needs_scratch(own, dtype) else None
        dequant_gemm(x, planes, own, None, None, scratch, out)
    assert_as_good(out, x @ values.to(dtype).T, exact_product(x, values))


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize("size", sized((40, 256, 12), {"llama-8b-down": (4096, 14336, 300)}))
def test_gemm(kind: str, size: tuple[int, int, int]) -> None:
    rows, columns, tokens = size
    for dtype in dtypes():
        packed, x = weight(kind, (rows, columns), dtype), normal(tokens, columns, dtype=dtype)
        values, out = dequantise(packed), nan(tokens, rows, dtype=dtype)
        scratch = nan(rows, columns, dtype=dtype) if needs_scratch([packed.kind], dtype) else None
        dequant_gemm(x, list(packed.planes), [packed.kind], None, None, scratch, out)
        # The kernel rounds W to x's dtype, as torch does here.
        assert_as_good(out, x @ values.to(dtype).T, exact_product(x, values))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", sized((70, 512), HEADS))
def test_rows_of_an_embedding(kind: str, size: tuple[int, int]) -> None:
    """The last rows lie past 2**31 bits of the planes."""
    dtype = dtypes()[-1]
    packed = weight(kind, size, dtype)
    ids = torch.tensor([0, size[0] - 1, size[0] // 2, 7, 7], device=DEVICE)
    found, expected = nan(5, size[1], dtype=dtype), nan(5, size[1], dtype=dtype)
    dequant_rows(list(packed.planes), kind, ids, found)
    dequant_rows_out(list(packed.planes), kind, ids, expected)
    exact, same = nan(5, size[1], dtype=torch.float32), expected
    dequant_rows_out(list(packed.planes), kind, ids, exact)
    assert_as_good(found, same, exact)


@pytest.mark.parametrize("size", sized((3, 512), {"llama-8b": (2048, 4096), "qwen-7b": (2048, 3584)}))
def test_norms(size: tuple[int, int]) -> None:
    for dtype in dtypes():
        x, scale, residual = (normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate((size, size[1:], size)))
        found, same = nan(*size, dtype=dtype), nan(*size, dtype=dtype)
        rms_norm(x, scale, EPS, found)
        rms_norm_out(x, scale, EPS, same)
        assert_as_good(found, same, exact_norm(x, scale))
        total, expected = residual.clone(), residual.clone()
        add_rms_norm(total, x, scale, EPS, found)
        add_rms_norm_out(expected, x, scale, EPS, same)
        assert torch.equal(total, expected)
        assert_as_good(found, same, exact_norm(expected, scale))


def exact_norm(x: Tensor, scale: Tensor) -> Tensor:
    return x.double() / (x.double().pow(2).mean(-1, True) + EPS).sqrt() * scale.double()


@pytest.mark.parametrize("size", sized((3, 512), {"llama-8b": (2048, 14336), "qwen-7b": (2048, 18944)}))
def test_swiglu(size: tuple[int, int]) -> None:
    for dtype in dtypes():
        gate_up = normal(size[0], 2 * size[1], dtype=dtype)
        found, same = nan(*size, dtype=dtype), nan(*size, dtype=dtype)
        swiglu(gate_up, found)
        swiglu_out(gate_up, same)
        gate, up = gate_up.double().chunk(2, -1)
        assert_as_good(found, same, F.silu(gate) * up)


@pytest.mark.parametrize("size", sized((3, 512), {"gemma3-12b": (2048, 15360)}))
def test_geglu(size: tuple[int, int]) -> None:
    for dtype in dtypes():
        gate_up = normal(size[0], 2 * size[1], dtype=dtype)
        found, same = nan(*size, dtype=dtype), nan(*size, dtype=dtype)
        geglu(gate_up, found)
        geglu_out(gate_up, same)
        gate, up = gate_up.double().chunk(2, -1)
        assert_as_good(found, same, F.gelu(gate, approximate="tanh") * up)


def test_every_kernel_is_checked_at_real_sizes() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_on_card_*.py"))
    missing = [name for name in build_kernels.kernel_files() if f"from kernels.gpu.{name} import" not in text]
    assert not missing
