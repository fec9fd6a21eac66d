"""Short steps as one compiled call against the layers one by one, on the same weights."""

import logging
import sys
from dataclasses import replace

import gguf
import pytest
import torch

from engine.models.registry import load_model
from kernels import dispatch
from kernels.dispatch import cpu_kernels
from kernels.kv_format import KV_FORMATS
from kernels.layer_groups import LayerPlace
from tests.support.batches import make_cache, make_metadata, poison_unseen
from tests.support.tiny_models import KINDS, VOCAB, save_gguf, save_safetensors, tiny_model

needs_kernels = pytest.mark.skipif(cpu_kernels() is None, reason="the CPU kernels can't be compiled here")
CPU = torch.device("cpu")
IDS = torch.randint(0, VOCAB, (300,), generator=torch.Generator().manual_seed(1))
OWN = (LayerPlace(0, 0), LayerPlace(0, 1))
TABLE = (torch.randperm(90, generator=torch.Generator().manual_seed(2)) + 1).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def load(folder, kind, quant):
    """Loaded with `--dtype auto`; `quant` None is safetensors."""
    model = tiny_model(kind)
    if quant is None:
        return load_model(save_safetensors(model, folder / kind), CPU)
    return load_model(save_gguf(model, folder / f"{kind}-{quant}.gguf", gguf.GGMLQuantizationType[quant]), CPU)


CHUNKS = (133, 1, 1, 5, 1, 32, 1)


def run(model, fused, chunks=CHUNKS, balance=None, **cache):
    """Logits of all rows, the tokens going in as `chunks`; without `fused`, layer by layer."""
    kept, store, rows, start = model._fused, make_cache(model, blocks=96, **cache), [], 0
    store.balance = balance
    model._fused = kept if fused else None
    for count in chunks:
        rows.append(
            model.forward(IDS[start : start + count], store, make_metadata([(start, count, TABLE)], cache=store))
        )
        start += count
        poison_unseen(store, TABLE, start)
    model._fused = kept
    return torch.cat(rows)


def test_the_kernels_compile_where_they_can():
    """The others are skipped without them, so a fault in their source would not be seen."""
    from kernels.cpu import compile as cpu_compile

    assert cpu_kernels() is not None or not cpu_compile.is_supported()


def assert_same(result, expected, chunks=CHUNKS, close=0.01):
    """Where a float32 sum ends on the other side of a half, an int8 activation is one step off, which shows a little
    in the rows that see it; in half of the rows of each kind of step it hardly does.

    NaN means that a slot was read before it was written.
    """
    difference = (result - expected).abs().amax(1)
    assert difference.max() < 0.1 * expected.abs().max()
    parts = difference.split(list(chunks))
    for kind in (
        [d for d in parts if len(d) == 1],
        [d for d in parts if 1 < len(d) < 8],
        [d for d in parts if len(d) > 8],
    ):
        assert not kind or torch.cat(kind).median() < close * expected.abs().max()


@needs_kernels
@pytest.mark.parametrize("quant", [None, "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_fused_equals_layer_by_layer(folder, kind, quant):
    model = load(folder, kind, quant)
    assert_same(run(model, True, blocks_per_extent=7), run(model, False))


@needs_kernels
@pytest.mark.parametrize("kv_format", ["fp16", "bf16"])
def test_sixteen_bit_caches(folder, kv_format):
    """A key that rounds the other way is one step of its type off."""
    model = load(folder, "qwen3", "Q8_0")
    result = run(model, True, kv_format=kv_format, blocks_per_extent=11)
    expected = run(model, False, kv_format=kv_format)
    assert_same(result, expected, close=0.01 + torch.finfo(KV_FORMATS[kv_format].dtype).eps)


@needs_kernels
@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
def test_quantised_caches(folder, kv_format):
    """Both ways quantise alike, so they differ by less than the format does from float32, balanced or not."""
    model = load(folder, "qwen3", "Q8_0")
    exact = run(model, False)
    torch.manual_seed(0)
    balance = torch.rand(model.config.num_layers, model.config.num_kv_heads, model.config.head_dim) + 0.5
    for one in (None, balance):
        fused = run(model, True, kv_format=kv_format, balance=one, blocks_per_extent=11)
        expected = run(model, False, kv_format=kv_format, balance=one)
        assert (fused - expected).abs().mean() < 0.5 * (expected - exact).abs().mean()
        assert 0 < (expected - exact).abs().max() < 0.5 * exact.abs().max()


@needs_kernels
@pytest.mark.parametrize("kind", ["mistral-window", "qwen2-window", "qwen3-window"])
def test_windows_of_some_layers(folder, kind):
    """Blocks that are out of sight are not in the tables: their places are taken by the null block, full of NaN."""
    model = load(folder, kind, None)
    assert_same(run(model, True, blocks_per_extent=7), run(model, False))
    assert model._fused is not None


@needs_kernels
@pytest.mark.parametrize("kv_format", ["fp32", "int8", "int4"])
@pytest.mark.parametrize(("window", "sinks"), [(24, 0), (24, 6), (150, 5), (5, 2)])
def test_windows_and_sinks(folder, window, sinks, kv_format):
    """Windows within one split and over several; the steps cross the place where sinks leave the window."""
    model, sizes = load(folder, "qwen3", "Q8_0"), {"window": window, "sinks": sinks, "kv_format": kv_format}
    torch.manual_seed(0)
    balance = torch.rand(model.config.num_layers, model.config.num_kv_heads, model.config.head_dim) + 0.5
    chunks = (4, 1, 1, 32, 1, 118, 3, 1, 1, 70, 1)
    fused, expected = (run(model, one, chunks, balance=balance, **sizes) for one in (True, False))
    assert_same(fused, expected, chunks, 0.02)


@needs_kernels
def test_a_layer_that_shares_a_place_reads_what_the_first_stored(folder):
    model = load(folder, "llama", "Q8_0")

    def logits(fused, places):
        kept, cache = model._fused, make_cache(model, blocks=96)
        object.__setattr__(cache.spec, "places", places)
        model._fused = kept if fused else None
        ids, start, rows = IDS[:40], 0, []
        for count in (20, 1, 19):
            meta = make_metadata([(start, count, TABLE)], cache=cache)
            rows.append(model.forward(ids[start : start + count], cache, meta))
            start += count
        model._fused = kept
        unused = [extent[:, 1].isnan().all() for extent in cache.extents]
        return torch.cat(rows), all(unused)

    shared = (LayerPlace(0, 0), LayerPlace(0, 0))
    (fused, unused), (expected, also), (apart, _) = logits(True, shared), logits(False, shared), logits(True, OWN)
    assert unused and also
    assert_same(fused, expected, (20, 1, 19))
    assert (fused - apart).abs().max() > 0.01


@needs_kernels
@pytest.mark.parametrize(
    "cache",
    [{}, {"kv_format": "fp16"}, {"kv_format": "int4"}, {"window": 40}, {"window": 150}, {"window": 40, "sinks": 4}],
    ids=str,
)
@pytest.mark.parametrize(("kind", "quant"), [("llama", "Q4_1"), ("qwen3", None)])
def test_steps_of_any_size_leave_the_same_bits(folder, kind, quant, cache):
    """However many tokens a step takes: what a reply leaves in the cache is what a prompt would."""
    model = load(folder, kind, quant)
    one_go = run(model, True, chunks=(260,), **cache)
    for chunks in ((200, *[1] * 60), (3, 129, 1, 7, 120), (64, 64, 64, 64, 4)):
        assert torch.equal(run(model, True, chunks=chunks, **cache), one_go)


@needs_kernels
def test_sequences_of_a_batch_equal_each_alone(folder):
    """Decodes, a chunk in mid-prompt and a fresh prompt in one step; the same bits as alone."""
    model = load(folder, "qwen2", "Q4_0")
    tables = [TABLE[i * 20 : (i + 1) * 20] for i in range(4)]
    before, counts = (70, 7, 20, 0), (1, 1, 13, 9)

    def store():
        cache = make_cache(model, blocks=96, blocks_per_extent=5)
        for table, count in zip(tables, before, strict=True):
            if count:
                model.forward(IDS[:count], cache, make_metadata([(0, count, table)]))
        return cache

    items = list(zip(before, counts, tables, strict=True))
    together = model.forward(torch.cat([IDS[s : s + n] for s, n, _ in items]), store(), make_metadata(items))
    alone = [model.forward(IDS[s : s + n], store(), make_metadata([(s, n, t)])) for s, n, t in items]
    assert torch.equal(together, torch.cat(alone))


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_in_the_layers_call_equal_the_heads_own(folder, kind):
    """Of some tokens of a step, in any order; with the head of its own and with one that is the embedding."""
    model = load(folder, kind, "Q4_1")
    assert model._fused.has_head
    meta = make_metadata([(0, 40, TABLE)])
    meta = replace(meta, logit_rows=torch.tensor([39, 3, 17]))
    hidden, logits = model.step(IDS[:40], make_cache(model, blocks=96), meta)
    assert torch.equal(hidden, model.hidden_states(IDS[:40], make_cache(model, blocks=96), meta))
    assert torch.equal(logits, model.head(hidden[meta.logit_rows]))


@needs_kernels
@pytest.mark.parametrize("tensor", [0, 1], ids=["key", "value"])
def test_bad_values_in_the_context_reach_the_result(folder, tensor):
    model = load(folder, "llama", "Q8_0")
    cache = make_cache(model, blocks=96)
    model.forward(IDS[:9], cache, make_metadata([(0, 9, TABLE)]))
    cache.extents[0][TABLE[1], 0, tensor, 2] = float("nan")
    hidden = model.hidden_states(IDS[9:10], cache, make_metadata([(9, 1, TABLE)]))
    assert not torch.isfinite(hidden).all()


@needs_kernels
def test_format_and_bytes_are_those_of_the_file(folder):
    model = load(folder, "llama", "Q4_1")
    matrices = sum(p.numel() for n, p in tiny_model("llama").named_parameters() if p.ndim == 2)
    norms = sum(p.numel() for p in tiny_model("llama").parameters() if p.ndim == 1)
    assert model.weight_format == "q4_1 (file)"
    assert model.weight_bytes == matrices * 20 // 32 + 4 * norms


@needs_kernels
def test_float32_is_not_quantised(folder):
    path = save_safetensors(tiny_model("llama"), folder / "exact")
    model = load_model(path, CPU, "float32")
    with torch.no_grad():
        expected = tiny_model("llama")(IDS[None, :20]).logits[0]
    logits = model.forward(IDS[:20], make_cache(model, blocks=96), make_metadata([(0, 20, TABLE)]))
    assert (logits - expected).abs().max() < 1e-4


def test_without_numba_the_model_runs_as_before(folder, monkeypatch, caplog):
    monkeypatch.setattr("builtins.__import__", _no_numba(__import__))
    cpu_kernels.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[:2] == ["kernels", "cpu"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("kernels.cpu", raising=False)
    try:
        with caplog.at_level(logging.WARNING):
            assert dispatch.cpu_kernels() is None
            model = load_model(save_safetensors(tiny_model("llama"), folder / "plain"), CPU)
        assert model.weight_format in ("float16", "float32")
        assert torch.isfinite(
            model.forward(IDS[:5], make_cache(model, blocks=96), make_metadata([(0, 5, TABLE)]))
        ).all()
        assert len([r for r in caplog.records if r.name == "kvscope.kernels"]) == 1
    finally:
        cpu_kernels.cache_clear()


def _no_numba(real):
    def load_module(name, *arguments, **options):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    return load_module
