"""Rows of the cache as the compiled CPU kernels write and read them, against the formats' definitions in torch."""

import numpy as np
import pytest
import torch

from kernels.dispatch import cpu_kernels
from kernels.kv_format import KV_FORMATS
from kernels.reference.kv_codes import decode, encode

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels can't be compiled here")


@pytest.fixture(scope="module")
def codecs():
    """`pack(kind, K out, V out, K scales, V scales, K, V, dim)`, `unpack(kind, out, row, scales, dim)`: addresses."""
    import numba

    from kernels.cpu import kv_ir

    @numba.njit("void(int64, int64, int64, int64, int64, int64, int64, int64)")
    def pack(kind, k_out, v_out, k_scales, v_scales, k, v, dim):
        if kind == kv_ir.INT8:
            kv_ir.pack_int8(k_out, v_out, k_scales, k, v, dim)
        elif kind == kv_ir.FP8:
            kv_ir.pack_fp8(k_out, k, dim)
            kv_ir.pack_fp8(v_out, v, dim)
        else:
            kv_ir.pack_int4(k_out, k_scales, k, dim)
            kv_ir.pack_int4(v_out, v_scales, v, dim)

    @numba.njit("void(int64, int64, int64, int64, int64)")
    def unpack(kind, out, row, scales, dim):
        if kind == kv_ir.INT8:
            kv_ir.unpack_int8(out, row, scales, dim)
        elif kind == kv_ir.FP8:
            kv_ir.unpack_fp8(out, row, scales, dim)
        else:
            kv_ir.unpack_int4(out, row, scales, dim)

    return pack, unpack


def rows(dim):
    """K and V [2, n, dim]: ordinary ones, large, tiny and equal values, zeros, and every border between fp8 codes."""
    random = torch.randn(2, 40, dim, generator=torch.Generator().manual_seed(dim))
    sizes = torch.tensor([1.0, 1e-3, 2e-2, 300.0, 1e4]).repeat(8)[:, None]
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    borders = torch.cat((codes, (codes[1:] + codes[:-1]) / 2, -codes))
    borders = torch.nn.functional.pad(borders, (0, -len(borders) % (2 * dim))).view(2, -1, dim)
    flat = torch.stack((torch.zeros(3, dim), torch.tensor([[0.0], [2.0], [-7.0]]).expand(3, dim)))
    return torch.cat((random * sizes, borders, flat), 1)


@pytest.mark.parametrize("dim", [8, 40, 64, 80, 128])
@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
def test_codes_scales_and_what_they_stand_for(codecs, kv_format, dim):
    from kernels.cpu import kv_ir

    kind = {"int8": kv_ir.INT8, "fp8": kv_ir.FP8, "int4": kv_ir.INT4}[kv_format]
    fmt, both = KV_FORMATS[kv_format], rows(dim)
    data, scales = encode(fmt, both)
    expected = decode(fmt, data, scales)
    pack, unpack = codecs
    width = fmt.scale_width(dim)
    for i in range(both.shape[1]):
        k, v = both[0, i].contiguous(), both[1, i].contiguous()
        out = torch.full((2, fmt.data_width(dim)), 85, dtype=torch.uint8)
        steps = torch.full((2, max(width, 1)), 7.0, dtype=fmt.scale_dtype)
        pack(
            kind,
            out[0].data_ptr(),
            out[1].data_ptr(),
            steps[0].data_ptr(),
            steps[1].data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            dim,
        )
        assert torch.equal(out, data[:, i].view(torch.uint8)), (i, k, v)
        if scales is not None:
            assert torch.equal(steps[: len(scales)], scales[:, i])
        for which in (0, 1):
            read = torch.full((dim,), float("nan"))
            unpack(
                kind,
                read.data_ptr(),
                out[which].data_ptr(),
                steps[min(which, max(fmt.scale_planes - 1, 0))].data_ptr(),
                dim,
            )
            np.testing.assert_allclose(
                read, expected[which, i], rtol=3e-7, atol=1e-7 * float(both[which, i].abs().max())
            )
