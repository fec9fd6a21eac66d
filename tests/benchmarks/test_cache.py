"""The cache's benchmark once, tiny: every part runs, and the figures that are arithmetic hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cache import articles, first_token, formats, layout, setting, windows
from benchmarks.cache.__main__ import PARTS, run
from engine.config import EngineConfig
from engine.local import LocalEngine
from tests.support.engines import tiny_parts

TEXT = "The tide comes in twice a day, and goes out twice a day. " * 8
TINY = setting.Setting(
    model=Path("tiny"),
    text=TEXT,
    quality_tokens=64,
    lengths=(12, 24, 40),
    prefix_tokens=96,
    session_tokens=160,
    decode_contexts=(32, 64),
    beams=3,
    beam_tokens=16,
    window_tokens=1200,
    window=64,
    window_turn=200,
    rounds=1,
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(config: EngineConfig) -> LocalEngine:
        options = {"kv_format": "fp16", "ram_limit": config.ram_limit, "snapshot_limit": config.snapshot_limit}
        options |= {"window": config.window, "sinks": config.sinks}
        budget = {} if config.kv_budget is None else {"kv_budget": config.kv_budget}
        return LocalEngine(*tiny_parts(data_dir=config.data_dir, block_size=16, **options, **budget))

    monkeypatch.setattr(setting, "LocalEngine", engine)
    monkeypatch.setattr(windows, "load_parts", lambda config: tiny_parts()[1](config))


def test_all_parts_run_and_give_json() -> None:
    assert set(json.loads(json.dumps(run(TINY, list(PARTS))))) == set(PARTS)


def test_formats() -> None:
    found = formats.measure(TINY)
    assert list(found) == ["fp32", "fp16", "bf16", "int8", "fp8", "int4"] or set(found) >= {"fp32", "int4"}
    assert found["fp32"]["bytes_per_token"] == 2 * found["fp16"]["bytes_per_token"]
    assert found["fp32"]["mean_kl"] == 0.0 and found["fp32"]["top1_agreement"] == 1.0
    assert 0 < found["fp16"]["mean_kl"] < found["int8"]["mean_kl"] < found["int4"]["mean_kl"]
    assert all(part["bytes"] >= TINY.quality_tokens * part["bytes_per_token"] for part in found.values())


def test_blocks_on_demand_hold_more_tokens_than_stretches() -> None:
    found = layout.utilisation(TINY)
    tokens, blocks = 12 + 24 + 40, 1 + 2 + 3
    assert found["tokens"] == tokens and found["block_utilisation"] == pytest.approx(tokens / (16 * blocks))
    assert found["preallocated_utilisation"] == pytest.approx(tokens / (3 * 512))


def test_beams_share_their_prefix() -> None:
    found = layout.beams(TINY)
    per_block = found["unshared_bytes"] // (3 * 7)
    assert (found["beams"], found["unshared_bytes"]) == (3, 3 * 7 * per_block), "96 + 15 tokens are in 7 blocks each"
    assert found["shared_bytes"] <= (6 + 3) * per_block, "the prefix of 6 blocks once"


def test_the_first_token_comes_from_where_the_cache_is() -> None:
    found = first_token.measure(TINY)
    reused = {place: part["reused_tokens"] for place, part in found.items()}
    assert reused["cold"] == reused["prefix cold"] == 0
    assert reused["pool"] == 160 and reused["disk"] == 172 and reused["RAM"] == 160
    assert reused["prefix shared"] == reused["prefix frozen"] >= 96 - 16


def test_the_articles_comparisons() -> None:
    found: dict[str, Any] = articles.measure(TINY)
    assert list(found) == ["32", "64"]
    assert found["64"]["cat_moves_bytes"] == 2 * found["32"]["cat_moves_bytes"]
    assert all(value > 0 for part in found.values() for value in part.values())


def test_a_chat_past_its_window_takes_what_the_window_takes() -> None:
    """The tiny model's own context is 512 tokens."""
    found = windows.measure(TINY)
    block = 16 * found["without_window_bytes"] // 1200
    # A window of 64 and 4 sinks are in 6 blocks of 16; two more windows are kept to go back to.
    assert found["constant"] and found["last_bytes"] <= (6 + 2 * 5 + 2) * block < found["without_window_bytes"] / 3
    assert [row["tokens"] for row in found["memory"]] == [199, 399, 599, 799, 999, 1199]
    narrower, per_token = found["narrower"], 2 * 2 * 2 * 16 * 2  # two layers, two KV heads of 16 in fp16
    assert narrower["expected_bytes"] == (256 - 64) * per_token
    # Beside its window a session keeps an eighth of it, at most 32 tokens, and windows end within blocks.
    assert narrower["saved_bytes"] == pytest.approx(narrower["expected_bytes"] + 16 * per_token, abs=32 * per_token)
    assert {len(values) for values in found["perplexity"].values()} == {6} and len(found["perplexity"]) == 3
