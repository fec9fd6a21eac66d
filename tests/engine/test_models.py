"""Decoders against transformers on the same weights, however the tokens reach them."""

from __future__ import annotations

import gguf
import pytest
import torch

from engine.models.registry import load_model
from kernels.kv_format import KV_FORMATS
from tests.support.batches import make_cache, make_metadata
from tests.support.tiny_models import KINDS, VOCAB, save_gguf, save_safetensors, tiny_model

CPU = torch.device("cpu")
LENGTH = 150


@pytest.fixture(scope="module", params=sorted(KINDS))
def reference(request):
    """(kind, transformers model, ids, its logits); long enough to pass the trained context of the scaled kinds."""
    model = tiny_model(request.param)
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    return request.param, model, ids, logits


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def loaded(request, reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    if request.param == "gguf":
        path = save_gguf(reference[1], folder / "model.gguf")
    else:
        path = save_safetensors(reference[1], folder)
    return load_model(path, CPU, "float32")


def shuffled_table(count, seed=0, first=1):
    return (torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + first).tolist()


@pytest.mark.parametrize("chunks", [[LENGTH], [64, 1, 48, 37], [1] * 20], ids=["one-go", "chunks", "single"])
def test_logits_equal_transformers(reference, loaded, chunks):
    _, _, ids, expected = reference
    cache, table, start, rows = make_cache(loaded), shuffled_table(40), 0, []
    for count in chunks:
        rows.append(loaded.forward(ids[start : start + count], cache, make_metadata([(start, count, table)])))
        start += count
    difference = (torch.cat(rows) - expected[:start]).abs().max()
    assert difference < 1e-3, "NaN here means that a slot was read before it was written"


def test_mixed_batch_equals_sequences_alone(reference, loaded):
    """Two decodes, a chunk in mid-prompt and a fresh prompt in one step, over blocks of several extents."""
    _, _, ids, expected = reference
    cache = make_cache(loaded, blocks=64, blocks_per_extent=5)
    order = shuffled_table(60)
    tables = [order[i * 15 : (i + 1) * 15] for i in range(4)]
    for table, count in zip(tables, (30, 7, 20), strict=False):
        loaded.forward(ids[:count], cache, make_metadata([(0, count, table)]))
    items = [(30, 1, tables[0]), (7, 1, tables[1]), (20, 13, tables[2]), (0, 9, tables[3])]
    batch = torch.cat([ids[start : start + count] for start, count, _ in items])
    wanted = torch.cat([expected[start : start + count] for start, count, _ in items])
    assert (loaded.forward(batch, cache, make_metadata(items)) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("kv_format", ["fp16", "bf16"])
def test_sixteen_bit_cache_costs_no_more_than_its_rounding(reference, loaded, kv_format):
    """Bound: twice the error of transformers' logits when K and V are rounded alike, estimated by one-go vs fp32."""
    _, _, ids, expected = reference
    cache = make_cache(loaded, kv_format=kv_format)
    meta = make_metadata([(0, LENGTH, shuffled_table(40))])
    error = (loaded.forward(ids, cache, meta) - expected).abs().max()
    scale = expected.abs().max()
    assert 0 < error < 8 * scale * torch.finfo(KV_FORMATS[kv_format].dtype).eps


def test_only_wanted_rows_reach_the_head(reference, loaded):
    _, _, ids, expected = reference
    meta = make_metadata([(0, LENGTH, shuffled_table(40))])
    object.__setattr__(meta, "logit_rows", torch.tensor([3, LENGTH - 1]))
    logits = loaded.forward(ids, make_cache(loaded), meta)
    assert logits.dtype == torch.float32
    assert (logits - expected[[3, LENGTH - 1]]).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16"])
@pytest.mark.parametrize("container", ["gguf", "safetensors"])
def test_rounded_weights_stay_close_and_rows_do_not_mix(dtype, container, tmp_path):
    model = tiny_model("qwen2")
    path = save_gguf(model, tmp_path / "m.gguf") if container == "gguf" else save_safetensors(model, tmp_path)
    loaded = load_model(path, CPU, dtype)
    ids = torch.arange(40) % VOCAB
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    one_go = loaded.forward(ids, make_cache(loaded), make_metadata([(0, 40, shuffled_table(10))]))
    cache, table = make_cache(loaded), shuffled_table(10)
    single = torch.cat([loaded.forward(ids[i : i + 1], cache, make_metadata([(i, 1, table)])) for i in range(40)])
    # `auto` is int8 with a scale per 32 weights, which rounds about as bfloat16 does.
    eps = torch.finfo(torch.float16 if dtype == "float16" else torch.bfloat16).eps
    assert (one_go - expected).abs().max() < 16 * eps * expected.abs().max()
    assert (one_go - single).abs().max() < (16 * eps if dtype == "bfloat16" else 1e-5) * expected.abs().max()


@pytest.mark.parametrize("quant", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_quantised_gguf_equals_its_dequantised_weights(quant, dtype, tmp_path):
    """The permutation of q and k must be undone on quantised rows as well."""
    model = tiny_model("llama", intermediate_size=128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                rows = gguf.dequantize(gguf.quantize(parameter.numpy(), quant), quant)
                parameter.copy_(torch.from_numpy(rows))
                assert name
        ids = torch.arange(30)
        expected = model(ids[None]).logits[0]
    loaded = load_model(save_gguf(model, tmp_path / "m.gguf", quant), CPU, dtype)
    logits = loaded.forward(ids, make_cache(loaded), make_metadata([(0, 30, shuffled_table(10))]))
    assert (logits - expected).abs().max() < (1e-3 if dtype == "float32" else 0.05 * expected.abs().max())


def test_a_window_that_is_switched_off_is_no_window(tmp_path):
    save_safetensors(tiny_model("qwen2", sliding_window=64, use_sliding_window=False), tmp_path)
    assert load_model(tmp_path, CPU, "float32").config.sliding_window is None
