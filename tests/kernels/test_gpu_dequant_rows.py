"""`dequant_rows` against its reference and the gguf package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.dequant_rows import dequant_rows, launch_dequant_rows
from kernels.planes import pack, plain
from kernels.reference.quantized import dequant_rows_out
from tests.support.interpreter import is_interpreting
from tests.support.quantised import KINDS, gguf_values, random_blocks


def device() -> str:
    return "cpu" if is_interpreting() else "cuda"


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_and_some_are_gguf_values(kind: str) -> None:
    blocks = random_blocks(kind, 5, 768)
    weight, values = pack(blocks, kind, 768).to(device()), gguf_values(blocks, kind).to(device())
    ids = torch.tensor([4, 0, 4], device=device())
    for op in (dequant_rows, dequant_rows_out):
        for dtype in (torch.float32, torch.float16):
            every = torch.full((5, 768), float("nan"), dtype=dtype, device=device())
            op(list(weight.planes), kind, None, every)
            # A card fuses the last product and sum, which rounds once where gguf rounds twice.
            torch.testing.assert_close(
                every, values.to(dtype), rtol=2e-7 if dtype == torch.float32 else 1e-3, atol=1e-7
            )
            some = torch.full((3, 800), float("nan"), dtype=dtype, device=device())
            op(list(weight.planes), kind, ids, some[:, :768])
            assert torch.equal(some[:, :768], every[ids]) and some[:, 768:].isnan().all()


def test_plain_rows_are_copied() -> None:
    values = torch.randn(6, 10, device=device())
    out = torch.empty(2, 10, dtype=torch.float16, device=device())
    dequant_rows(list(plain(values).planes), "F32", torch.tensor([5, 1], device=device()), out)
    assert torch.equal(out, values[[5, 1]].half())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.zeros(8, 32)}, r"out must be \[8, 64\]"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, r"out must be \[3, 64\]"),
        ({"ids": torch.zeros(8, dtype=torch.int32)}, "ids must be a contiguous int64"),
        ({"kind": "IQ4_XS"}, "IQ4_XS can't be multiplied"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    weight = pack(random_blocks("Q4_0", 8, 64), "Q4_0", 64)
    arguments = {"planes": weight.planes, "kind": "Q4_0", "ids": None, "out": torch.zeros(8, 64)}
    with pytest.raises(ValueError, match=message):
        launch_dequant_rows(**(arguments | change))
