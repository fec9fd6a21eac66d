"""What the cache of a session says of its format: bytes, key and value ranges, probes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from engine.debugging.protocol import ProbeQuery
from engine.errors import ConfigError
from engine.loader import check_card_has
from engine.memory.plan import kv_bytes_per_token
from engine.protocol import GenerateRequest
from engine.sampling.params import SamplingParams
from kernels.kv_format import KV_FORMATS
from tests.support.engines import run, tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = tuple(b"A cache that is kept in fewer bits.")


def probed(kv_format: str) -> tuple[dict, dict[str, list]]:
    engine = tiny_engine(kv_format=kv_format)
    run(engine, GenerateRequest(PROMPT, GREEDY, session_id="s"))
    report = engine.inspect("s")
    rows = {tensor: engine.probe("s", ProbeQuery(tensor, 0, 1, 0, 30, 16)) for tensor in "kv"}
    memory = engine.memory()["sessions"]["s"]
    assert memory["kv_used"] == report["bytes_used"]
    assert memory["kv_reserved"] == len(report["block_table"]) * report["block_size"] * report["bytes_per_token"]
    engine.check_integrity()
    engine.close()
    return report, rows


@pytest.fixture(scope="module")
def exact() -> tuple[dict, dict[str, list]]:
    return probed("fp32")


@pytest.mark.parametrize("kv_format", list(KV_FORMATS))
def test_bytes_ranges_and_probes(exact, kv_format):
    report, rows = probed(kv_format)
    assert report["kv_format"] == kv_format == report["blocks"][0]["format"]
    assert report["bytes_per_token"] == kv_bytes_per_token(2, 2, 16, kv_format)
    assert report["bytes_used"] == report["cache_pos"] * report["bytes_per_token"]
    assert report["kv_ratio"] == pytest.approx(exact[0]["kv_ratio"], rel=0.3 if kv_format == "int4" else 0.1)
    # Of layer 0, whose input knows nothing of the cache.
    share = {"fp32": 0, "fp16": 1e-3, "bf16": 1e-2, "int8": 0.02, "fp8": 0.07, "int4": 0.25}[kv_format]
    for tensor in "kv":
        for row, wanted in zip(rows[tensor], exact[1][tensor], strict=True):
            largest = max(map(abs, wanted["values"]))
            assert row["token_id"] == wanted["token_id"]
            assert row["values"] == pytest.approx(wanted["values"], abs=share * largest + 1e-6)
            assert kv_format == "fp32" or row["values"] != wanted["values"]


def test_an_empty_cache_has_no_ratio():
    engine = tiny_engine(kv_format="int8")
    assert engine.inspect("nobody")["kv_ratio"] is None
    engine.close()


@pytest.mark.parametrize(
    ("kv_format", "capability", "fits"), [("fp8", (8, 6), False), ("fp8", (8, 9), True), ("int8", (7, 5), True)]
)
def test_fp8_needs_a_card_that_has_it(kv_format, capability, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check_card_has(kv_format, torch.device("cpu"))
    with nullcontext() if fits else pytest.raises(ConfigError, match="capability"):
        check_card_has(kv_format, torch.device("cuda"))
