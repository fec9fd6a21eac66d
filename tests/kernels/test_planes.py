"""Planes hold exactly what GGUF's blocks hold, in as many bytes."""

from __future__ import annotations

import pytest
import torch

from engine.weights.catalog import ModelSource
from engine.weights.gguf_reader import GGUFSource
from kernels.planes import FORMATS, WORDS, dequantise, pack, plain, stack
from tests.support.quantised import KINDS, gguf_values, random_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_planes_decode_to_gguf_values_bit_for_bit(kind: str) -> None:
    blocks = random_blocks(kind, 5, 768)
    weight = pack(blocks, kind, 768)
    assert torch.equal(dequantise(weight), gguf_values(blocks, kind))
    assert weight.nbytes == blocks.nbytes
    assert (weight.kind, weight.rows, weight.columns) == (kind, 5, 768)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_codes_start_where_a_128_bit_load_may(kind: str) -> None:
    codes = pack(random_blocks(kind, 3, 768), kind, 768).planes[0]
    assert codes.shape == (3, 768 // FORMATS[kind].unit, WORDS)
    assert codes.stride(0) * codes.itemsize % 16 == 0


def test_rows_are_repacked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks("Q6_K", 7, 512)
    whole = pack(blocks, "Q6_K", 512)
    monkeypatch.setattr("kernels.planes._ROWS_AT_ONCE", 1024)
    assert all(map(torch.equal, whole.planes, pack(blocks, "Q6_K", 512).planes))


@pytest.mark.model
def test_real_weights(default_model: ModelSource) -> None:
    source = GGUFSource(default_model.path)
    for name in ("embed.weight", "layers.0.q.weight", "layers.3.down.weight"):
        blocks, kind = source.blocks(name)[:64], source.block_format(name)
        assert kind is not None
        assert torch.equal(dequantise(pack(blocks, kind, source.shapes()[name][1])), gguf_values(blocks, kind))


def test_stacked_rows_follow_each_other() -> None:
    parts = [pack(random_blocks("Q4_K", n, 512, seed=n), "Q4_K", 512) for n in (3, 1, 2)]
    assert torch.equal(dequantise(stack(parts)), torch.cat([dequantise(p) for p in parts]))


def test_unlike_weights_are_not_stacked() -> None:
    weights = [pack(random_blocks(kind, 2, 256), kind, 256) for kind in ("Q4_0", "Q8_0")]
    with pytest.raises(ValueError, match="same kind"):
        stack(weights)
    with pytest.raises(ValueError, match="same number of columns"):
        stack([weights[0], pack(random_blocks("Q4_0", 2, 64), "Q4_0", 64)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_weights_are_kept(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 32).to(dtype)
    held = plain(weight)
    assert torch.equal(held.planes[0], weight)
    assert all(map(torch.equal, held.planes, pack(weight.view(torch.uint8), held.kind, 32).planes))
    with pytest.raises(ValueError, match="no kind"):
        plain(weight.to(torch.int32))


def test_bytes_that_are_no_whole_blocks_are_refused() -> None:
    blocks = random_blocks("Q4_K", 2, 256)
    with pytest.raises(ValueError, match="blocks of Q4_K"):
        pack(blocks[:, :-1], "Q4_K", 256)
    with pytest.raises(ValueError, match="blocks of Q4_K"):
        pack(blocks, "Q4_K", 128)
    with pytest.raises(ValueError, match="IQ4_XS can't be repacked"):
        pack(blocks, "IQ4_XS", 256)
