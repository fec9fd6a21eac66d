"""What is asked of a row of logits, compiled, against torch in float64."""

import pytest
import torch

from kernels.dispatch import cpu_kernels, row_measures
from kernels.reference import row_measures as reference

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels can't be compiled here")


@pytest.mark.parametrize("size", [1, 7, 8, 320, 49152, 49155])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_measures_are_those_of_the_softmax(size, scale):
    torch.manual_seed(size)
    row = torch.randn(size) * scale
    row[size // 2] = row.max() if size > 1 else row[0]
    for chosen in {0, size // 2, size - 1, int(row.argmin())}:
        p = row.double().softmax(-1)
        expected = (
            float(p[chosen].log()),
            int((row > row[chosen]).sum()),
            float(-(p * (p + 1e-300).log()).sum()),
            p.max(),
        )
        for module in (row_measures("cpu"), reference):
            logprob, rank, entropy, top1 = module.measures(row, chosen)
            assert logprob == pytest.approx(expected[0], abs=2e-4 + 1e-6 * scale) and rank == expected[1]
            assert entropy == pytest.approx(expected[2], abs=1e-4) and top1 == pytest.approx(
                float(expected[3]), rel=1e-5
            )


@pytest.mark.parametrize("size", [5, 320, 325])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found_anywhere(size, bad):
    row = torch.randn(size) * 1e30
    assert row_measures("cpu").all_finite(row) and reference.all_finite(row)
    for place in (0, size // 2, size - 1):
        broken = row.clone()
        broken[place] = bad
        assert not row_measures("cpu").all_finite(broken) and not reference.all_finite(broken)


def test_the_compiled_ones_are_used_for_logits_on_the_processor():
    assert row_measures("cpu").__name__ == "kernels.cpu.row_measures"
    assert row_measures("cuda") is reference
