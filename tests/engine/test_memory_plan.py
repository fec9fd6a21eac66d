"""The memory plan: figures that can be worked out by hand, and the allocations that are really made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFileError
from engine.kv_cache.cache import KVCache, fitting_extent_bytes
from engine.kv_cache.spec import KVCacheSpec
from engine.kv_cache.ssm_state import SSMStateSpec
from engine.loader import assemble
from engine.memory.model_plan import PlannedWeights, plan_model, planned_weights
from engine.memory.plan import (
    ModelSizes,
    human_bytes,
    kv_bytes,
    kv_bytes_per_token,
    kv_tokens,
    plan_memory,
    plan_table,
)
from engine.models.layers import pick_format
from engine.models.registry import load_model, read_config
from engine.weights.gguf_reader import GGUFSource
from engine.weights.names import from_gguf
from engine.weights.safetensors_reader import SafetensorsSource
from engine.weights.source import WeightSource
from kernels.kv_format import KV_FORMATS
from tests.support.tiny_models import save_gguf, save_safetensors, tiny_model
from tests.support.tiny_tokenizer import chat_tokenizer

MIB = 2**20
CPU = torch.device("cpu")
SIZES = ModelSizes(
    weight_bytes=100 * MIB,
    num_layers=16,
    num_kv_heads=8,
    head_dim=64,
    hidden_size=2048,
    intermediate_size=8192,
    vocab_size=32000,
    context_tokens=131072,
)


@pytest.mark.parametrize(("kv_format", "per_token"), [("fp16", 32 * 1024), ("bf16", 32 * 1024), ("fp32", 64 * 1024)])
@pytest.mark.parametrize("tokens", [4096, 32768])
def test_kv_bytes_of_a_known_shape(kv_format, per_token, tokens):
    assert kv_bytes_per_token(16, 8, 64, kv_format) == per_token
    exact = tokens * per_token
    assert exact <= kv_bytes(tokens, per_token, 16) <= exact * 1.01
    assert exact == {4096: 128 * MIB, 32768: 1024 * MIB}[tokens] * (per_token // 32768)


@pytest.mark.parametrize("kv_format", list(KV_FORMATS))
def test_prediction_and_allocation_agree(kv_format):
    spec = KVCacheSpec(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, format=KV_FORMATS[kv_format])
    cache = KVCache(spec, torch.device("cpu"), extent_bytes=fitting_extent_bytes(spec, 20_000))
    tokens = 20_000
    cache.grow(-(-tokens // 16) + 1)
    predicted = kv_bytes(tokens, kv_bytes_per_token(4, 2, 64, kv_format), 16)
    assert predicted == pytest.approx(cache.reserved_bytes, rel=0.05)


def plan(sizes=SIZES, **changes):
    settings = {"kv_format": "fp16", "block_size": 16, "kv_budget": 2**30, "available": 2**31, "total_device": 2**32}
    return plan_memory(sizes, **{**settings, **changes})


def test_the_context_is_cut_down_to_the_budget():
    cut = plan()
    assert cut.max_seq_len == kv_tokens(2**30, 32768, 16) == 32768 - 16
    assert cut.kv_total == 2**30 and cut.fits
    assert plan(kv_budget=2**40, available=2**41).max_seq_len == 131072


@pytest.mark.parametrize(
    "changes",
    [{"max_seq_len": 65536}, {"available": 512 * MIB}, {"kv_budget": 0}, {"kv_budget": 32768 * 16}],
    ids=["context beyond budget", "card too small", "no budget", "null block only"],
)
def test_what_does_not_fit_is_known_before_loading(changes):
    assert not plan(**changes).fits
    assert plan_table(plan(**changes), model="m", device="cpu", dtype="float16", kv_format="fp16").endswith("no")


def test_a_longer_context_costs_its_tokens_and_no_more():
    short, long = plan(max_seq_len=1024), plan(max_seq_len=2048)
    assert long.needed - short.needed == 1024 * 32768


def test_half_the_layers_recurrent_halve_the_kv_cache_and_add_a_constant():
    """16 layers, 8 KV heads of 64, half of them Mamba-2 with 32 heads of 64 x 128 and a convolution of 4 taps."""
    state = SSMStateSpec(8, (2048 + 2 * 128, 3), (32, 64, 128), torch.float16)
    assert state.nbytes == 8 * (4 * 32 * 64 * 128 + 2 * 3 * 2304)
    hybrid = replace(SIZES, num_layers=8, state_bytes=state.nbytes)
    for kv_format, per_token in (("fp16", 16 * 1024), ("int8", 8 * 1024 + 8 * 8 * 4)):
        short = plan(hybrid, kv_format=kv_format, max_seq_len=4096)
        long = plan(hybrid, kv_format=kv_format, max_seq_len=32768)
        assert short.kv_bytes_per_token == per_token and short.state_bytes == long.state_bytes == state.nbytes
        assert long.needed - short.needed == (32768 - 4096) * per_token
        assert short.needed - short.weights - short.workspace == (4096 + 16) * per_token + state.nbytes
        assert short.fits and long.fits


def test_without_attention_the_context_costs_nothing():
    recurrent = replace(SIZES, num_layers=0, num_kv_heads=0, head_dim=0, state_bytes=20 * MIB)
    planned = plan(recurrent)
    assert (planned.max_seq_len, planned.kv_total, planned.kv_bytes_per_token) == (131072, 0, 0)
    assert planned.fits and planned.state_budget == 51 * 20 * MIB
    assert plan(recurrent, max_seq_len=1024).needed == planned.needed
    assert not plan(recurrent, kv_budget=19 * MIB).fits
    table = plan_table(planned, model="m", device="cpu", dtype="float16", kv_format="fp16")
    assert "20.0 MiB (20971520 bytes) per session" in table


def test_states_take_at_most_half_of_the_budget_where_there_are_keys_and_values():
    hybrid = replace(SIZES, num_layers=8, state_bytes=20 * MIB)
    planned = plan(hybrid)
    assert planned.state_budget == 25 * 20 * MIB
    assert planned.max_seq_len == kv_tokens(2**30 - planned.state_budget, 16 * 1024, 16)
    assert plan(hybrid, kv_budget=2**34, available=2**35).state_budget == 64 * 20 * MIB
    assert not plan(hybrid, kv_budget=39 * MIB).fits


@pytest.mark.parametrize("kind", ["mamba2", "bamba"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_and_allocation_of_recurrent_models_agree(tmp_path: Path, kind, dtype):
    """Weights, the context's length, and the state of a session, from the header and as they really are."""
    path = save_safetensors(tiny_model(kind), tmp_path)
    config = EngineConfig(tmp_path, str(path), device="cpu", dtype=dtype, kv_budget=MIB)
    planned = plan_model(config).plan
    model = load_model(path, torch.device("cpu"), dtype)
    parts = assemble(config, model, chat_tokenizer(), kind)
    assert planned.weights == pytest.approx(model.weight_bytes, rel=0.01)
    assert planned.max_seq_len == parts.max_seq_len
    assert planned.kv_bytes_per_token == parts.cache.spec.bytes_per_token
    parts.cache.grow(-(-parts.max_seq_len // 16) + 1 if planned.kv_bytes_per_token else 1)
    parts.states.take((1,))
    assert planned.kv_total == parts.cache.reserved_bytes and planned.state_bytes == parts.states.reserved_bytes
    assert planned.state_budget == (parts.state_slots - 1) * planned.state_bytes
    assert planned.kv_total + planned.state_budget <= MIB


def test_a_budget_below_one_state_is_refused(tmp_path: Path):
    path = save_safetensors(tiny_model("mamba2"), tmp_path)
    model = load_model(path, torch.device("cpu"), "float32")
    with pytest.raises(ConfigError, match=r"^The KV budget does not hold one state of 30\.8 KiB; raise --kv-budget\.$"):
        assemble(EngineConfig(tmp_path, str(path), kv_budget=30 * 1024), model, chat_tokenizer(), "m")


@pytest.mark.parametrize("kind", ["llama", "llama-bias", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("container", ["gguf", "safetensors"])
def test_weights_planned_from_the_header_are_those_loaded(tmp_path: Path, kind, dtype, container):
    if container == "gguf":
        if kind == "llama-bias":
            pytest.skip("the container has no names for these biases")
        path = save_gguf(tiny_model(kind), tmp_path / "m.gguf")
        source = GGUFSource(path)
    else:
        path = save_safetensors(tiny_model(kind), tmp_path)
        source = SafetensorsSource(path)
    assert_planned_as_loaded(source, dtype)


@pytest.mark.parametrize("kind", ["llama", "qwen2"], ids=["tied", "own head"])
@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "F16", "BF16"])
@pytest.mark.parametrize("triton", [False, True])
def test_quantised_weights_are_planned_as_they_are_kept(tmp_path: Path, kind, quant, triton):
    """The plan said int8 for a file whose own blocks are kept."""
    path = save_gguf(tiny_model(kind), tmp_path / "m.gguf", GGMLQuantizationType[quant])
    assert_planned_as_loaded(GGUFSource(path), "auto", triton)


def test_a_file_of_several_types_is_planned_as_it_is_kept(tmp_path: Path):
    mixed = {"head.weight": "Q8_0", "embed.weight": "Q5_1", "layers.0.down.weight": "Q5_0", "layers.1.o.weight": "F16"}

    def kind_of(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType[mixed.get(from_gguf(name) or "", "Q4_0")]

    source = GGUFSource(save_gguf(tiny_model("qwen2"), tmp_path / "m.gguf", kind_of))
    for triton in (False, True):
        assert_planned_as_loaded(source, "auto", triton)
    assert planned_weights(source, read_config(source)[1], pick_format(CPU, "auto")).weight_format.count("(file)") == 2


def assert_planned_as_loaded(source: WeightSource, dtype: str, triton: bool = False) -> None:
    fmt = pick_format(CPU, dtype, triton)
    loaded = load_model(source.path, CPU, dtype, triton=triton)
    planned = planned_weights(source, read_config(source)[1], fmt)
    assert planned == PlannedWeights(loaded.weight_bytes, loaded.weight_format)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(save_gguf(tiny_model("llama"), tmp_path / "whole.gguf").read_bytes()[:3000])
    with pytest.raises(ModelFileError, match=r"cut\.gguf"):
        plan_model(EngineConfig(tmp_path, str(cut), device="cpu"))


def test_the_plan_of_a_file(tmp_path: Path):
    path = save_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    planned = plan_model(EngineConfig(tmp_path, str(path), device="cpu", kv_format="fp32", kv_budget=MIB))
    table = str(planned)
    assert planned.plan.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4 and planned.plan.max_seq_len == 512
    assert "tiny" in table and "1024 bytes" not in table and "fits" in table


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**42, "4.0 TiB")]
)
def test_sizes_for_people(count, text):
    assert human_bytes(count) == text
