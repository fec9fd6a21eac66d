"""Windows, sinks and shared layers in whole engines: what they hold, what they save, and what they refuse."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import window as benchmark
from engine.attention_layout import attention_layout, context_limit
from engine.config import EngineConfig, check_window
from engine.errors import ConfigError
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache import KVCache, fitting_extent_bytes
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.spec import KVCacheSpec
from engine.memory.plan import ModelSizes, kv_bytes, kv_bytes_per_token, plan_memory, plan_table
from engine.protocol import Finished, GenerateRequest
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from kernels.kv_format import KV_FORMATS
from kernels.layer_groups import LayerGroup
from tests.support.engines import loaded_model, run, tiny_engine, tiny_parts
from tests.support.tiny_models import WINDOW

A, B = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MIB = 2**20


def turn(engine, prompt, session=A, forced_ids=None, **changes) -> Finished:
    request = GenerateRequest(tuple(prompt), replace(GREEDY, **changes), session, forced_ids=forced_ids)
    last = run(engine, request)[-1]
    assert isinstance(last, Finished), last
    return last


def text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(5, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- what they hold --------------------------------------------------------------------------------------------------


def test_memory_stays_the_same_over_a_chat_far_longer_than_the_models_context():
    engine = tiny_engine(window=64, sinks=4, context=512)
    history, reserved, pools = text(40), [], []
    assert engine.capabilities()["max_seq_len"] == 2**17
    for index in range(20):
        reply = engine.tokenizer.encode("The sea is deep and blue. " * 3)[:60]
        turn(engine, history, forced_ids=tuple(reply), max_tokens=60)
        history = [*history, *reply, *text(40, index)]
        report = engine.inspect(A)
        reserved.append(report["bytes_reserved"])
        pools.append(engine.memory()["kv_reserved"])
        assert report["cache_pos"] == len(history) - 41 and all(report["invariants"].values())
        [group] = report["groups"]
        assert group["window"] == 64 and group["sinks"] == 4 and group["bytes"] == report["bytes_reserved"]
        assert 64 < group["held_tokens"] <= 3 * 64 + 4 + 3 * 4
        assert report["bytes_used"] == group["held_tokens"] * report["bytes_per_token"]
        ledger = engine.memory()["sessions"][A]
        assert (ledger["kv_used"], ledger["kv_reserved"]) == (report["bytes_used"], report["bytes_reserved"])
    assert report["cache_pos"] > 3 * 512
    assert len(set(reserved[3:])) <= 2 and len(set(pools[3:])) == 1
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("window", [4096, 1024])
def test_a_window_holds_its_tokens_and_no_more(window):
    windows = PrefixCache(BlockPool(4), 16, groups=(LayerGroup(window, 4),)).windows
    cache = PrefixCache(BlockPool(2000), 16, groups=(LayerGroup(window, 4),))
    sequence = Sequence(cache)
    sequence.set_tokens([n % 97 for n in range(10_000)])
    most = 0
    while sequence.remaining:
        count = min(256, sequence.remaining)
        sequence.reserve(sequence.cache_pos + count)
        most = max(most, cache.pool.used_count)
        sequence.advance(count)
    assert most <= windows.blocks(10_000, 256) <= (window + 256) // 16 + 5
    # Sinks, window and slack, each rounded to blocks.
    assert window // 16 + 1 <= sequence.blocks.count == cache.pool.used_count <= window // 16 + 1 + 3


def test_a_smaller_window_saves_what_arithmetic_says():
    """4096 to 1024 in 30 layers of 3 KV heads of 64 in 16 bits: 3072 tokens of 23,040 bytes."""
    per_token = kv_bytes_per_token(30, 3, 64, "fp16")
    assert per_token == 23_040
    wide, narrow = (kv_bytes(10_000, per_token, 16, (LayerGroup(window, 4),)) for window in (4096, 1024))
    assert wide - narrow == 3072 * per_token
    held = []
    for window in (64, 16):
        engine = tiny_engine(window=window, sinks=4)
        turn(engine, text(400), max_tokens=100)
        engine._call(lambda engine=engine: engine._steps().scheduler.idle[A].drop_spare())
        report = engine.inspect(A)
        held.append(report["bytes_reserved"])
        engine.close()
    assert held[0] - held[1] == pytest.approx((64 - 16) * report["bytes_per_token"], abs=8 * report["bytes_per_token"])


@pytest.mark.parametrize("kv_format", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [4096, 32768])
def test_the_plan_of_half_the_layers_sliding_is_what_is_allocated(kv_format, tokens):
    """C22: 16 layers, 8 KV heads of 64, every second one with a window of 1024."""
    groups = (LayerGroup(1024), LayerGroup())
    spec = KVCacheSpec(8, 8, 64, 16, KV_FORMATS[kv_format], groups, ())
    per_group = kv_bytes_per_token(8, 8, 64, kv_format)
    assert spec.bytes_per_token == 2 * per_group
    cache = KVCache(spec, torch.device("meta"), fitting_extent_bytes(spec, tokens))
    cache.grow(spec.windows.blocks(tokens, 1) + 1)
    planned = kv_bytes(tokens, per_group, 16, groups)
    assert planned == pytest.approx(cache.reserved_bytes, rel=0.05)
    assert planned == pytest.approx((tokens + 1024) * per_group, rel=0.03)
    sizes = ModelSizes(1, 8, 8, 64, 64, 64, 64, 131072, groups=groups)
    settings = {"kv_format": kv_format, "block_size": 16, "available": 2**40, "total_device": 2**40}
    plan = plan_memory(sizes, kv_budget=planned, max_seq_len=tokens, **settings)
    assert plan.fits and plan.kv_total == planned
    assert not plan_memory(sizes, kv_budget=planned - 1, max_seq_len=tokens, **settings).fits
    assert tokens - 16 <= plan_memory(sizes, kv_budget=planned, **settings).max_seq_len <= tokens
    table = plan_table(plan, model="m", device="cpu", dtype="float16", kv_format=kv_format)
    assert "1 of 2 groups of layers keep the last 1024 tokens" in table


def test_local_layers_hold_their_window_and_global_ones_all():
    """C08: cache_pos came from a local layer, and positions were wrong once it was past the window."""
    prompt, results = text(200), []
    for chunk in (200, 48):
        engine = tiny_engine(kind="qwen3-window")
        engine._call(lambda engine=engine, chunk=chunk: set_chunk(engine, chunk))
        first = turn(engine, prompt, max_tokens=10)
        again = [*prompt, *first.token_ids, *text(5, 1)]
        results.append((first.token_ids, turn(engine, again, max_tokens=10).token_ids))
        report = engine.inspect(A)
        assert report["cache_pos"] == len(again) + 9
        local, everything = report["groups"]
        assert (local["window"], local["layers"], everything["window"]) == (WINDOW, [0, 2], None)
        assert everything["held_tokens"] == report["cache_pos"] and WINDOW <= local["held_tokens"] < 100
        rows = engine.probe(A, benchmark_query(layer=0))
        assert [row["norm"] is None for row in rows] == [True] * 10
        assert all(row["norm"] is not None for row in engine.probe(A, benchmark_query(layer=1)))
        engine.close()
    assert results[0] == results[1]


def set_chunk(engine, chunk: int) -> None:
    scheduler = engine._steps().scheduler
    scheduler.limits = replace(scheduler.limits, max_batch_tokens=chunk)


def benchmark_query(layer: int):
    from engine.debugging.protocol import ProbeQuery

    return ProbeQuery("k", layer, 0, 0, 10, 4)


def test_a_window_of_few_tokens_has_figures_too():
    engine = tiny_engine(window=8, block_size=4)
    turn(engine, text(100))
    assert engine.inspect(A)["kv_ratio"] > 0
    engine.close()


# -- turns, snapshots, tiers -----------------------------------------------------------------------------------------


def test_the_last_turn_is_regenerated_without_computing_it_again():
    engine = tiny_engine(window=32)
    first = turn(engine, text(100), max_tokens=60)
    prompt = [*text(100), *first.token_ids, *text(30, 1)]
    turn(engine, prompt, max_tokens=80)
    assert turn(engine, prompt, max_tokens=4).stats.computed_tokens == 1
    edited = [*text(100), *first.token_ids, *text(30, 2)]
    assert turn(engine, edited, max_tokens=80).stats.computed_tokens <= 30 + 4
    # An edit of what lies further back finds no window, and all is computed again.
    far, cached = [*text(100)[:50], *text(80, 3)], engine.inspect(A)["cache_pos"]
    stats = turn(engine, far, max_tokens=4).stats
    assert stats.computed_tokens == len(far)
    assert (stats.miss.position, stats.miss.tokens_lost) == (50, cached)
    engine.close()


@pytest.mark.parametrize("options", [{"window": 32, "sinks": 4}, {"kind": "qwen3-window"}], ids=["sinks", "local"])
def test_a_restart_goes_on_from_the_window_that_was_kept(tmp_path: Path, options):
    settings = {"data_dir": tmp_path, "snapshot_limit": 64 * MIB, **options}
    engine = tiny_engine(**settings)
    first = turn(engine, text(150), max_tokens=40)
    prompt = [*text(150), *first.token_ids, *text(12, 1)]
    info, report = engine.snapshot(A), engine.inspect(A)
    assert info["blocks"] == sum(sum(map(bool, group["block_table"])) for group in report["groups"])
    expected = turn(engine, prompt, B).token_ids
    engine.close()
    engine = tiny_engine(**settings)
    again = turn(engine, prompt)
    assert again.token_ids == expected and again.stats.computed_tokens <= 14
    # What was kept to go back to is there as well.
    assert turn(engine, prompt, max_tokens=3).stats.computed_tokens == 1
    engine.check_integrity()
    engine.close()


def test_displaced_sessions_come_back_from_ram():
    engine = tiny_engine(window=16, sinks=2, blocks=24, ram_limit=8 * MIB)
    first = turn(engine, text(60), max_tokens=20)
    turn(engine, text(60, 9), B, max_tokens=20)
    engine._call(lambda: engine._steps().scheduler.make_room(20))
    away = engine.inspect(A)
    assert away["away"]["tier"] == "ram" and 0 < len(away["blocks"]) < 20
    again = turn(engine, [*text(60), *first.token_ids, 7, 8])
    assert again.stats.computed_tokens <= 3
    engine.close()


def test_a_frozen_prefix_of_a_model_with_windows_is_taken_over(tmp_path: Path):
    settings = {"window": 32, "data_dir": tmp_path}
    engine = tiny_engine(**settings)
    entry = engine.freeze("You are a patient teacher of mathematics. " * 4, "teacher")
    engine.close()
    engine = tiny_engine(**settings)
    [manifest] = [m for m in engine._frozen._known.values() if m is not None]
    for seed, session in enumerate((A, B)):
        # The first session has moved on from there, and the window before the prefix is read again.
        prompt = [*manifest.token_ids, *text(60, seed)]
        assert turn(engine, prompt, session).stats.reused_tokens == entry["tokens"]
    engine.close()


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("llama", {"sinks": 4}, "--sinks needs --window"),
        ("llama", {"window": 3}, "less than a block of the cache, which holds 4 tokens"),
        ("llama", {"window": 16, "sinks": 16}, "must be less than --window 16"),
        ("llama", {"window": 510, "sinks": 4}, "model's own context of 512"),
        ("llama", {"window": 16, "max_seq_len": 513}, "more than the model's own context of 512"),
        ("mamba2", {"window": 16}, "no attention layers, so --window does not apply"),
        ("mamba2", {"share_layers": 2}, "no attention layers, so --share-layers does not apply"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_sentence(kind, options, sentence):
    config, load = tiny_parts(kind=kind, **options)
    with pytest.raises(ConfigError, match=sentence):
        load(config)


def layout(kind: str = "qwen3-window", **options):
    config = EngineConfig(Path("unused"), block_size=4, **options)
    model = loaded_model(kind).config
    check_window(config)
    return attention_layout(config, model), context_limit(config, model)


def test_a_declared_window_is_kept_where_it_is_narrower_than_the_one_asked_for():
    assert layout()[0].groups == (LayerGroup(WINDOW), LayerGroup())
    assert layout(window=128, sinks=4)[0].groups == (LayerGroup(WINDOW), LayerGroup(128, 4))
    assert layout(window=8, sinks=4)[0].groups == (LayerGroup(8, 4),)
    assert layout("mistral-window", window=WINDOW, sinks=4)[0].groups == (LayerGroup(WINDOW, 4),)


def test_a_window_that_the_whole_context_fits_into_is_none():
    assert layout("llama", window=512)[0].groups == (LayerGroup(),)
    assert layout("llama", window=511)[0].groups == (LayerGroup(511),)
    assert layout(max_seq_len=WINDOW)[0].groups == (LayerGroup(),)


def test_only_sinks_let_a_chat_outgrow_the_models_context():
    assert layout("llama", window=64)[1] == 512
    assert layout("llama", window=64, sinks=1)[1] == 2**17
    assert layout("llama", window=64, sinks=1, max_seq_len=2000)[1] == 2000


# -- shared layers ---------------------------------------------------------------------------------------------------


def test_shared_layers_take_half_and_say_what_they_cost():
    engine = tiny_engine(kind="bamba", share_layers=2)
    alone = tiny_engine(kind="bamba")
    assert 2 * engine.capabilities()["bytes_per_token"] == alone.capabilities()["bytes_per_token"]
    [warning] = [w for w in engine.capabilities()["warnings"] if "--share-layers 2 is an experiment" in w]
    assert "mean KL divergence" in warning and "0.000" not in warning
    assert not any("share-layers" in w for w in alone.capabilities()["warnings"])
    prompt = text(60)
    whole = turn(engine, prompt, max_tokens=12).token_ids
    again = turn(engine, [*prompt, *whole, 7], max_tokens=12)
    fresh = turn(engine, [*prompt, *whole, 7], B, max_tokens=12)
    assert again.token_ids == fresh.token_ids and again.stats.reused_tokens >= 60
    engine.close()
    alone.close()


# -- the benchmark ---------------------------------------------------------------------------------------------------


def test_the_benchmark_runs_on_a_tiny_model():
    config, load = tiny_parts(window=32, sinks=4, context=256)
    result = benchmark.measure(config, text(600), load(config), 100)
    assert [row["tokens"] for row in result["memory"]] == [99, 199, 299, 399, 499, 599]
    assert len({row["session_bytes"] for row in result["memory"][1:]}) <= 2
    assert len({row["pool_bytes"] for row in result["memory"][1:]}) == 1
    assert set(result["perplexity"]) == {"4 sinks + window", "window alone", "truncation"}
    for values in result["perplexity"].values():
        assert len(values) == 6 and all(1 < value < 1e6 for value in values)
    # Until the window is full nothing differs.
    parts = load(config)
    first = [
        benchmark.perplexities(parts.model, parts.cache.spec, text(33), 32, 4, 40)[name]
        for name in result["perplexity"]
    ]
    assert first[0] == pytest.approx(first[1], rel=1e-4)
    benchmark.show(result)


def test_losses_are_those_of_one_pass():
    config, load = tiny_parts()
    parts, ids = load(config), text(300)
    values = benchmark.losses(parts.model, parts.cache.spec, ids)
    assert len(values) == 299
    assert benchmark.losses(parts.model, parts.cache.spec, ids, 200) == pytest.approx(values[199:], abs=1e-4)


def test_beams_of_a_model_with_windows_choose_what_they_choose_with_room_for_all():
    replies = set()
    for blocks, size in ((None, 4), (40, 4), (None, 8)):
        engine = tiny_engine(window=16, sinks=2, blocks=blocks, block_size=size)
        params = replace(GREEDY, max_tokens=40)
        last = run(engine, GenerateRequest(tuple(text(50)), params, A, beams=BeamParams(3)))[-1]
        replies.add(last.token_ids)
        report = engine.inspect(A)
        assert all(report["invariants"].values())
        assert all(beam["own_blocks"] <= len(beam["block_table"]) for beam in report["beams"])
        engine.check_integrity()
        engine.close()
    assert len(replies) == 1
