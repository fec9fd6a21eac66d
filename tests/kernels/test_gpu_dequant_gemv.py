"""`dequant_gemv` against its reference, and the reference against the gguf package and float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.weights.catalog import ModelSource
from engine.weights.gguf_reader import GGUFSource
from kernels.gpu import dequant_gemv as module
from kernels.gpu.dequant_gemv import dequant_gemv, launch_dequant_gemv
from kernels.gpu.linear import PlaneLinear
from kernels.planes import PackedWeight, dequantise, pack, plain, stack
from kernels.reference.quantized import dequant_gemv_out
from tests.support.interpreter import is_interpreting, overflow_checks
from tests.support.quantised import KINDS, gguf_values, random_blocks

SHAPES = ((37, 768, 1), (70, 1536, 2), (9, 4096, 8))
"""(N, K, M): ragged rows, and units that do and don't fill the last step of 64."""


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpreted programs cost the same whatever they hold, so let them be few."""
    if is_interpreting():
        monkeypatch.setattr(module, "launch_params", lambda *_: {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 1})
    yield


DTYPES = [torch.float16, torch.float32]
if not is_interpreting():  # which gets bfloat16 wrong
    DTYPES.append(torch.bfloat16)


def device() -> str:
    return "cpu" if is_interpreting() else "cuda"


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    op: Any = dequant_gemv,
) -> Tensor:
    width = weight.rows // 2 if activation else weight.rows
    out = torch.full((x.shape[0], width), float("nan"), dtype=x.dtype, device=x.device)
    op(x, list(weight.planes), [weight.kind], bias, residual, activation, out)
    return out


def assert_as_exact_as_torch(x: Tensor, weight: PackedWeight, values: Tensor) -> None:
    """Both are at most twice as far from float64 as the same product in x's dtype in torch."""
    exact = x.double() @ values.double().T
    allowed = 2 * error(x @ values.to(x.dtype).T, exact) + 1e-6
    assert error(product(x, weight), exact) <= allowed
    assert error(product(x, weight, op=dequant_gemv_out), exact) <= allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_gguf_times_x(kind: str, dtype: torch.dtype) -> None:
    for n, k, m in SHAPES if dtype == torch.float16 else SHAPES[:1]:
        blocks = random_blocks(kind, n, k)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(n)).to(device(), dtype)
        assert_as_exact_as_torch(x, pack(blocks, kind, k).to(device()), gguf_values(blocks, kind).to(device()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_weights(dtype: torch.dtype) -> None:
    for n, k, m in ((37, 576, 1), (5, 1000, 3)):
        weight, x = torch.randn(n, k, device=device()).to(dtype), torch.randn(m, k, device=device()).to(dtype)
        assert_as_exact_as_torch(x, plain(weight), weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("kind", [*KINDS, "F16"])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_real_sizes_and_graphs(kind: str, rows: int) -> None:
    n, k = 4096 + 3, 3584
    if kind == "F16":
        weight = plain(torch.randn(n, k).half()).to("cuda")
    else:
        weight = pack(torch.from_numpy(random_blocks(kind, n, k)).cuda(), kind, k)
    x = torch.randn(rows, k, device="cuda").half()
    assert_as_exact_as_torch(x, weight, dequantise(weight))
    out = torch.empty(rows, n, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dequant_gemv(x, list(weight.planes), [kind], None, None, "", out)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, product(x, weight))


@pytest.mark.parametrize(
    ("units", "expected"),
    [(128, (128, 4)), (18, (32, 1)), (48, (64, 2)), (448, (64, 2)), (112, (128, 4)), (592, (128, 4))],
)
def test_few_threads_idle(units: int, expected: tuple[int, int]) -> None:
    assert module._step(units, 128, 4) == expected


@pytest.mark.model
@pytest.mark.parametrize("name", ["layers.0.q.weight", "layers.5.down.weight", "embed.weight"])
def test_real_weights(default_model: ModelSource, name: str) -> None:
    source = GGUFSource(default_model.path)
    blocks, kind, columns = source.blocks(name)[:96], source.block_format(name), source.shapes()[name][1]
    assert kind is not None
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(3)).to(device(), torch.float16)
    assert_as_exact_as_torch(x, pack(blocks, kind, columns).to(device()), gguf_values(blocks, kind).to(device()))


def packed(kind: str, n: int, k: int, seed: int = 1) -> PackedWeight:
    if kind == "F16":
        return plain(torch.randn(n, k).half().mul_(0.05)).to(device())
    return pack(random_blocks(kind, n, k, seed), kind, k).to(device())


def assert_one_launch_does_all(parts: list[PackedWeight], rows: int, activation: str) -> None:
    """Bias, activation and residual over all parts, into a slice of a wider row, and in place of the residual."""
    values = torch.cat([dequantise(part) for part in parts])
    planes, kinds = [plane for part in parts for plane in part.planes], [part.kind for part in parts]
    (n, k), width = values.shape, len(values) // 2 if activation else len(values)
    x, bias = torch.randn(rows, k, device=device()).half(), torch.randn(n, device=device()).half()
    residual = torch.randn(rows, width, device=device()).half()
    exact = x.double() @ values.double().T + bias.double()
    if activation:
        gate, up = exact.chunk(2, -1)
        gate = gate * torch.sigmoid(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        exact = gate * up
    exact = exact + residual.double()
    for op in (dequant_gemv_out, dequant_gemv):
        wide = torch.full((rows, width + 3), float("nan"), dtype=x.dtype, device=device())
        op(x, planes, kinds, bias, residual, activation, wide[:, 1 : width + 1])
        # float16 holds a result to 2^-11 of its size, and everything before is float32.
        torch.testing.assert_close(wide[:, 1 : width + 1].double(), exact, rtol=2**-10, atol=1e-4)
        assert wide[:, 0].isnan().all() and wide[:, width + 1 :].isnan().all(), "wrote past its slice"
    in_place = residual.clone()
    dequant_gemv(x, planes, kinds, bias, in_place, activation, in_place)
    assert torch.equal(in_place, wide[:, 1 : width + 1])


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "F16"])
@pytest.mark.parametrize("activation", ["", "silu", "gelu"])
@pytest.mark.parametrize("rows", [1, 3])
def test_bias_activation_and_residual_in_one_launch(kind: str, activation: str, rows: int) -> None:
    assert_one_launch_does_all([stack([packed(kind, 37, 512, seed) for seed in (1, 2)])], rows, activation)


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q4_1", "Q5_1"), ("Q3_K", "Q4_K", "Q5_K"), ("F16", "Q8_0", "Q2_K")], ids="+".join
)
@pytest.mark.parametrize("rows", [1, 3])
def test_q_k_and_v_of_several_kinds_in_one_launch(kinds: tuple[str, ...], rows: int) -> None:
    """Parts end in the middle of a program's rows; the last one is the largest, which decides on the warps."""
    assert_one_launch_does_all([packed(kind, n, 512) for kind, n in zip(kinds, (70, 9, 133), strict=False)], rows, "")


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q3_K", "F16")], ids="+".join)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("rows", [1, 3])
def test_gate_and_up_of_two_kinds_in_one_launch(kinds: tuple[str, str], activation: str, rows: int) -> None:
    assert_one_launch_does_all([packed(kind, 37, 512) for kind in kinds], rows, activation)


@pytest.mark.parametrize(("rows", "activation"), [(1, ""), (8, ""), (2, "silu"), (2, "gelu")])
def test_a_matrix_of_any_kinds_is_one_launch(rows: int, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """QKV of Q4_K_M's files took two launches, GeGLU two, gate and up of two kinds three."""
    launched: list[str] = []
    for name in ("dequant_gemv_kernel", "gated_gemv_kernel"):
        kernel = getattr(module, name)
        counting = {"__getitem__": lambda self, grid, name=name, kernel=kernel: launched.append(name) or kernel[grid]}
        monkeypatch.setattr(module, name, type("Counting", (), counting)())
    linear = PlaneLinear([packed("Q4_K", 8, 256), packed("Q6_K", 8, 256)], None)
    x = torch.randn(rows, 256, device=device())
    found = linear.gated(x, activation) if activation else linear(x)
    assert found.isfinite().all() and len(launched) == 1


def test_rows_of_x_may_lie_apart_and_nothing_around_them_is_read() -> None:
    weight = pack(random_blocks("Q5_0", 33, 96), "Q5_0", 96).to(device())
    wide = torch.full((3, 200), float("nan"), device=device())
    wide[:, 100:196] = torch.randn(3, 96, device=device())
    x = wide[:, 100:196]
    assert error(product(x, weight), x.double() @ dequantise(weight).double().T) < 1e-6


@pytest.mark.skipif(not is_interpreting(), reason="checks the interpreter's integers")
def test_index_arithmetic_stays_in_range() -> None:
    weight = pack(random_blocks("Q3_K", 5, 256), "Q3_K", 256)
    with overflow_checks():
        assert product(torch.randn(1, 256), weight).isfinite().all()


def test_a_graph_may_capture_the_op() -> None:
    weight = pack(random_blocks("Q4_0", 8, 64), "Q4_0", 64)
    out = torch.empty(1, 8)
    arguments = (torch.randn(1, 64), list(weight.planes), ["Q4_0"], None, None, "", out)
    tests = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(torch.ops.kvscope.dequant_gemv.default, arguments, test_utils=tests)
    assert found == dict.fromkeys(tests, "SUCCESS")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, 96)}, r"x must be \[M, 64\]"),
        ({"x": torch.zeros(9, 64), "out": torch.zeros(9, 8)}, "at most 8 rows"),
        ({"x": torch.zeros(64, 2).T, "out": torch.zeros(2, 8)}, "must be contiguous"),
        ({"out": torch.zeros(1, 7)}, r"must be \[1, 8\]"),
        ({"residual": torch.zeros(1, 4)}, r"must be \[1, 8\]"),
        ({"bias": torch.zeros(4)}, r"bias must be a contiguous \[8\]"),
        ({"kinds": ["IQ4_XS"]}, "IQ4_XS can't be multiplied"),
        ({"kinds": ["Q4_0", "Q4_0"]}, "have 10 planes, not 5"),
        ({"activation": "tanh"}, "'tanh' is unknown"),
        ({"planes": (torch.zeros(7, 2, 4, dtype=torch.int32),) * 5, "activation": "silu"}, "as many rows each"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    weight = pack(random_blocks("Q4_0", 8, 64), "Q4_0", 64)
    arguments = {
        "x": torch.zeros(1, 64), "planes": weight.planes, "kinds": ["Q4_0"], "bias": None, "residual": None,
        "activation": "", "out": torch.zeros(1, 8),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        launch_dequant_gemv(**(arguments | change))
