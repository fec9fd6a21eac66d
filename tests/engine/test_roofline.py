"""Sizes and bounds that can be worked out by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks import roofline
from engine.memory.plan import INT4_GROUP, KV_BITS, WEIGHT_BLOCKS, kv_bytes_per_token, matrix_bytes
from kernels import kv_format, planes

MODELS = {shape.name: shape for shape in roofline.MODELS}


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("fp16", 32 * 1024),  # 16 layers, 8 KV heads, head size 64: 2 * 16 * 8 * 64 * 2
        ("fp8", 16 * 1024),
        ("int8", 16 * 1024 + 16 * 8 * 4),  # a float32 per head
        ("int4", 8 * 1024 + 16 * 8 * 2 * 2 * 4),  # two groups of K and two of V, 4 bytes each
    ],
)
def test_kv_of_one_token(name: str, per_token: int) -> None:
    assert kv_bytes_per_token(16, 8, 64, name) == per_token


def test_sizes_are_those_of_the_kernels_formats() -> None:
    assert KV_BITS.keys() == kv_format.KV_FORMATS.keys() and INT4_GROUP == kv_format.INT4_GROUP
    for name, fmt in kv_format.KV_FORMATS.items():
        for head_dim in (64, 80, 96, 128, 256):
            assert kv_bytes_per_token(3, 2, head_dim, name) == 3 * 2 * fmt.bytes_per_head(head_dim)
    for name, block in planes.FORMATS.items():
        assert WEIGHT_BLOCKS[name] == (block.columns, block.nbytes)


def test_a_matrix_in_blocks() -> None:
    assert matrix_bytes(10, 4096, "F16") == 10 * 8192
    assert matrix_bytes(10, 4096, "Q4_0") == 10 * 128 * 18
    assert matrix_bytes(10, 4096, "Q6_K") == 10 * 16 * 210
    assert matrix_bytes(3, 33, "Q8_0") == 3 * 2 * 34


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-3.2-1B", 1_235_814_400),
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Llama-3.2-3B", 3_212_749_824),
        ("Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Llama-3-8B", 8_030_261_248),
    ],
)
def test_parameters_are_those_that_the_makers_publish(name: str, parameters: int) -> None:
    assert roofline.token_bytes(MODELS[name], "F16").held == 2 * parameters


def test_the_mix_is_about_as_large_as_llama_cpps_file() -> None:
    """Meta-Llama-3-8B Q4_K_M is 4.92 GB, Q4_0 4.66 GB, Q8_0 8.54 GB, with headers and the vocabulary."""
    for weights, size in (("Q4_K_M", 4.92e9), ("Q4_0", 4.66e9), ("Q8_0", 8.54e9)):
        assert roofline.token_bytes(MODELS["Llama-3-8B"], weights).held == pytest.approx(size, rel=0.01)


def test_a_token_reads_all_weights_but_the_embedding() -> None:
    """8B in fp16: 16 GB less the embedding of 128256 * 4096, so 67 tokens/s at most with 1008 GB/s."""
    parts = roofline.token_bytes(MODELS["Llama-3-8B"], "F16")
    assert parts.weights == 2 * (8_030_261_248 - 128256 * 4096 + 4096)
    card = roofline.CARDS[0]
    assert card.bandwidth == 1008e9
    assert roofline.tokens_per_second(card, parts, 0, 0) == pytest.approx(67.1, abs=0.1)
    # 128 KiB per token: 8192 tokens are 1 GiB on top.
    seconds = (parts.weights + parts.activations + 2**30) / 1008e9
    assert roofline.tokens_per_second(card, parts, 131072, 8192) == pytest.approx(1 / seconds)
    assert parts.activations < 0.001 * parts.weights


def test_what_fits() -> None:
    """fp16 weights of a 3B model are 6.4 GB: not on 4 GiB; a 1B model's 2.5 GB are."""
    card = roofline.CARDS[1]
    assert card.bandwidth == 192e9

    def planned(name: str, weights: str, kv: str):
        return roofline.plan(card, MODELS[name], roofline.token_bytes(MODELS[name], weights), kv)

    assert not planned("Llama-3.2-3B", "F16", "fp16").fits
    assert planned("Llama-3.2-1B", "F16", "fp16").fits
    fp16, int8 = planned("Llama-3.2-3B", "Q4_K_M", "fp16"), planned("Llama-3.2-3B", "Q4_K_M", "int8")
    assert fp16.fits and int8.fits
    # int8 with its scales takes 0.508 of fp16.
    assert int8.max_seq_len == pytest.approx(fp16.max_seq_len / 0.508, rel=0.01)
    assert fp16.needed <= card.memory - roofline.RESERVED < fp16.needed + 17 * fp16.kv_bytes_per_token


def test_it_ends_in_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "roofline"
    assert len(result["bounds"]) == len(roofline.CARDS) * len(roofline.MODELS) * len(roofline.WEIGHTS)
