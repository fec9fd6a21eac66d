"""C10: what a cache in few bits costs a model is measured when it is made, and told where it is much."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.kv_cache import calibration
from engine.kv_cache.cache import KVCache
from engine.kv_cache.calibration import KL_LIMITS, balance_constants, calibrate, precision_loss
from engine.kv_cache.spec import KVCacheSpec
from engine.loader import assemble
from engine.models.registry import DecoderModel, load_model
from engine.replay import Replay
from kernels.kv_format import KV_FORMATS
from tests.support.engines import loaded_model
from tests.support.tiny_models import save_safetensors, tiny_model
from tests.support.tiny_tokenizer import chat_tokenizer

CPU = torch.device("cpu")
IDS = torch.randint(0, 271, (300,), generator=torch.Generator().manual_seed(1)).tolist()


def loaded(folder: Path, outliers: float) -> DecoderModel:
    """A qwen2 whose keys have two channels `outliers` times as large as the others, by weight and bias."""
    model = tiny_model("qwen2", vocab_size=271)
    with torch.no_grad():
        for layer in model.model.layers:
            projection, width = layer.self_attn.k_proj, layer.self_attn.head_dim
            for channel in (1, 5):
                projection.weight[channel::width] *= outliers
                projection.bias[channel::width] *= outliers
    return load_model(save_safetensors(model, folder), CPU, "float32")


@pytest.fixture(scope="module")
def hard(tmp_path_factory) -> DecoderModel:
    return loaded(tmp_path_factory.mktemp("hard"), 50.0)


def empty_cache(model: DecoderModel, kv_format: str) -> KVCache:
    sizes = model.config
    return KVCache(KVCacheSpec(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, 16, KV_FORMATS[kv_format]), CPU)


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
def test_a_model_with_key_outliers_stays_within_the_limit_or_is_warned_of(hard, kv_format, tmp_path):
    """256 positions of 300, teacher-forced, against a float32 cache."""
    cache = empty_cache(hard, kv_format)
    loss = calibrate(hard, cache, IDS)
    exact = Replay(hard, replace(cache.spec, format=KV_FORMATS["fp32"]), 300).extend(IDS, logits=256)
    coarse = Replay(hard, cache.spec, 300, cache.balance).extend(IDS, logits=256)
    assert precision_loss(exact, coarse).mean_kl == pytest.approx(loss.mean_kl, rel=0.3)
    assert kv_format == "fp8" or loss.mean_kl <= KL_LIMITS[kv_format]
    config = EngineConfig(tmp_path, kv_format=kv_format, kv_budget=2**24)
    warnings = assemble(config, hard, chat_tokenizer(), "hard").warnings
    told = [warning for warning in warnings if kv_format in warning]
    assert bool(told) == (calibrated_loss(hard, kv_format) > KL_LIMITS[kv_format])


def calibrated_loss(model: DecoderModel, kv_format: str) -> float:
    ids = chat_tokenizer().encode(calibration.CALIBRATION_TEXT)[: calibration.CALIBRATION_TOKENS]
    return calibrate(model, empty_cache(model, kv_format), ids).mean_kl


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_balance_is_worth_it_where_keys_have_outliers(hard, kv_format):
    cache = empty_cache(hard, kv_format)
    balanced = calibrate(hard, cache, IDS)
    exact = Replay(hard, replace(cache.spec, format=KV_FORMATS["fp32"]), 300).extend(IDS, logits=300)
    plain = precision_loss(exact, Replay(hard, cache.spec, 300).extend(IDS, logits=300))
    assert balanced.mean_kl < 0.6 * plain.mean_kl


@pytest.mark.parametrize("evenness", calibration.EVENNESS)
def test_balance_changes_no_score(hard, evenness):
    cache = empty_cache(hard, "fp32")
    replay = Replay(hard, cache.spec, 300)
    expected = replay.extend(IDS[:100], logits=100)
    balance = balance_constants(*replay.cache.read_tokens(replay.sequence.block_tables, 0, 100), evenness)
    other = Replay(hard, cache.spec, 300, balance)
    torch.testing.assert_close(other.extend(IDS[:100], logits=100), expected, atol=2e-4, rtol=0)
    read = other.cache.read_tokens(other.sequence.block_tables, 0, 100)
    torch.testing.assert_close(
        read, replay.cache.read_tokens(replay.sequence.block_tables, 0, 100), atol=1e-4, rtol=1e-5
    )


def random_model(folder: Path) -> DecoderModel:
    """As `transformers` draws its weights; two channels of each key 50 times as large as drawn."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 271, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for channel in (1, 5):
                layer.self_attn.k_proj.weight[channel :: layer.self_attn.head_dim] *= 50.0
    return load_model(save_safetensors(model, folder), CPU, "float32")


LIMITS = {"int8": (0.02, 0.97), "fp8": (0.05, 0.95), "int4": (0.3, 0.0)}
"""Mean KL divergence and top-1 agreement that C10 allows."""


def test_a_random_model_with_large_key_channels_is_within_all_limits(tmp_path):
    """256 positions of 300, teacher-forced, against an fp16 cache; balanced on other ids than those.

    The qwen2 above is not asked for the same likeliest tokens: all of its weights matter, and its two likeliest tokens
    are so close that rounding V alone to 8 bits, behind exact keys, changes 2 to 4 % of them.
    """
    model = random_model(tmp_path)
    half = Replay(model, empty_cache(model, "fp16").spec, 300).extend(IDS, logits=256)
    for kv_format, (most_kl, least_agreement) in LIMITS.items():
        cache = empty_cache(model, kv_format)
        calibrate(model, cache, list(reversed(IDS))[:128])
        loss = precision_loss(half, Replay(model, cache.spec, 300, cache.balance).extend(IDS, logits=256))
        assert loss.mean_kl <= most_kl and loss.top1_agreement >= least_agreement, (kv_format, loss)


def longest_run(ids: list[int]) -> int:
    return max(len(list(group)) for _, group in itertools.groupby(ids))


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
def test_greedy_text_does_not_get_stuck_on_a_token(hard, kv_format):
    """128 tokens: no token more than 20 times in a row unless float32 has it too."""
    runs = []
    for name in ("fp32", kv_format):
        cache = empty_cache(hard, name)
        if name != "fp32":
            calibrate(hard, cache, IDS)
        replay, ids = Replay(hard, cache.spec, 512, cache.balance), []
        logits = replay.extend(IDS)
        for _ in range(128):
            ids.append(int(logits[-1].argmax()))
            logits = replay.extend(ids[-1:])
        runs.append(longest_run(ids))
    assert runs[1] <= max(20, runs[0])


@pytest.mark.parametrize("kind", ["qwen2", "bamba", "mamba2"])
def test_replay_in_chunks_is_one_go(kind, monkeypatch):
    model = loaded_model(kind)
    spec = replace(empty_cache(model, "fp32").spec, num_layers=model.config.num_attention_layers, places=())
    whole = Replay(model, spec, 301).extend(IDS, logits=300)
    monkeypatch.setattr("engine.replay.REPLAY_CHUNK", 48)
    chunked = Replay(model, spec, 301)
    parts = torch.cat((chunked.extend(IDS[:100], logits=100), chunked.extend(IDS[100:], logits=200)))
    torch.testing.assert_close(parts, whole, atol=2e-4, rtol=0)
    assert chunked.extend([5], logits=1).shape == (1, 271) and chunked.sequence.cache_pos == 301
