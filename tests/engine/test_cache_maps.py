"""Maps of the cache and single rows beside their exact values: right numbers, also with windows and shared stores."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.debugging import maps
from engine.debugging.maps import drawn, similarity
from engine.debugging.protocol import FaultRequest, MapQuery, ProbeQuery, ValueQuery
from engine.debugging.rows import StoredRows, read_rows, write_rows
from engine.errors import Conflict, InvalidRequest
from engine.jobs import run_through
from engine.protocol import GenerateRequest
from engine.sampling.params import SamplingParams
from tests.support.engines import RecordingEngine, run, tiny_engine

BLOCK = 4
A = str(uuid.UUID(int=1))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
IDS = tuple(torch.randint(1, 256, (70,), generator=torch.Generator().manual_seed(5)).tolist())


@pytest.fixture
def engine() -> Iterator[RecordingEngine]:
    yield from started()


def started(**options: Any) -> Iterator[RecordingEngine]:
    engine = tiny_engine(block_size=BLOCK, fault_injection=True, **options)
    run(engine, GenerateRequest(IDS, GREEDY, A))
    yield engine
    engine.check_integrity()
    engine.close()


def stored_rows(engine: RecordingEngine) -> StoredRows:
    lane = engine._steps(A)
    sequence = lane.scheduler.find(A)
    return engine._call(lambda: read_rows(lane.parts.cache, sequence, sequence.cache_pos))


def rows_of(engine: RecordingEngine, layer: int) -> torch.Tensor:
    """float32 [2, count, heads, dim] of what is cached."""
    return stored_rows(engine).layer(layer)


@pytest.mark.parametrize("head", [None, 1])
def test_norms_and_similarities_are_those_of_the_rows(engine, head):
    for index, tensor in enumerate("kv"):
        norms = engine.cache_map(A, MapQuery(f"{tensor}_norm", head))
        alike = engine.cache_map(A, MapQuery(f"{tensor}_similarity", head))
        count = norms["cache_pos"]
        assert norms["columns"] == [[p, p] for p in range(count)]
        for layer in range(len(norms["values"])):
            rows = rows_of(engine, layer)[index]
            rows = rows.flatten(1) if head is None else rows[:, head]
            assert norms["values"][layer] == pytest.approx(rows.norm(dim=-1).tolist(), rel=1e-4)
            wanted = torch.cosine_similarity(rows[1:], rows[:-1], dim=-1).tolist()
            assert alike["values"][layer][0] is None
            assert alike["values"][layer][1:] == pytest.approx(wanted, abs=1e-4)


def test_a_map_read_in_many_slices_is_the_same(engine, monkeypatch):
    whole = engine.cache_map(A, MapQuery("k_similarity"))
    monkeypatch.setattr(maps, "SLICE_VALUES", 1)
    assert engine.cache_map(A, MapQuery("k_similarity")) == whole


def test_damage_stands_out_in_a_coarse_map(engine):
    """A copied row is one of similarity 1, a NaN is told as such, and both keep their position in a wide column."""
    engine.inject(FaultRequest(A, "shift", 0, 41, 1, 1.0))
    engine.inject(FaultRequest(A, "nan", 1, 62, 1))
    alike = engine.cache_map(A, MapQuery("k_similarity", None, 8))
    column = next(i for i, (first, last) in enumerate(alike["columns"]) if first <= 41 <= last)
    assert alike["columns"][0] == [0, 9] and alike["columns"][-1][1] == alike["cache_pos"] - 1
    assert alike["values"][0][column] == 1.0 and alike["positions"][0][column] == 41
    norms = engine.cache_map(A, MapQuery("k_norm", None, 8))
    column = next(i for i, (first, last) in enumerate(norms["columns"]) if first <= 62 <= last)
    assert norms["bad"] == [[1, column]] and norms["positions"][1][column] == 62


def test_unwritten_rows_are_alike_and_zero_beside_another_is_not():
    one, zero = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
    assert similarity(zero, zero).item() == 1 and similarity(one, zero).item() == 0
    assert similarity(one, 2 * one).item() == pytest.approx(1) and similarity(one, -one).item() == pytest.approx(-1)


def test_what_is_not_held_has_no_value():
    values = torch.tensor([[1.0, 2.0, math.nan, 4.0]])
    held = torch.tensor([[False, True, False, True]])
    told = drawn(values, held, MapQuery("k_norm", None, 4))
    assert told["values"] == [[None, 2.0, None, 4.0]] and told["bad"] == []
    alike = drawn(values, held, MapQuery("k_similarity", None, 4))
    assert alike["values"] == [[None] * 4] and alike["bad"] == [] and alike["medians"] == [None]


def test_layers_with_a_window_show_what_they_still_hold():
    for engine in started(kind="qwen2", window=16, sinks=4):
        told = engine.cache_map(A, MapQuery("k_norm"))
        probed = engine.probe(A, ProbeQuery(layer=0, head=0, start=0, count=told["cache_pos"], dims=1))
        held = [row["norm"] is not None for row in probed]
        assert not all(held) and any(held[:4])
        assert [value is not None for value in told["values"][0]] == held


def test_layers_that_share_a_store_show_the_same():
    for engine in started(share_layers=2):
        told = engine.cache_map(A, MapQuery("v_norm"))
        assert told["values"][0] == told["values"][1]


def test_what_is_not_cached_is_refused_in_a_sentence(engine):
    with pytest.raises(Conflict, match="Nothing of this chat is in the cache"):
        engine.cache_map(str(uuid.uuid4()), MapQuery())
    with pytest.raises(Conflict, match="does not hold position 400"):
        engine.cached_values(A, ValueQuery(position=400))
    for query in (MapQuery("norm"), MapQuery(head=2), MapQuery(columns=0), MapQuery(columns=257)):
        with pytest.raises(InvalidRequest):
            engine.cache_map(A, query)
    for bad in (ValueQuery("q"), ValueQuery(layer=99), ValueQuery(head=-1), ValueQuery(position=-1)):
        with pytest.raises(InvalidRequest):
            engine.cached_values(A, bad)


def test_a_chat_that_changes_meanwhile_is_told(engine, monkeypatch):
    monkeypatch.setattr(maps, "SLICE_VALUES", 1)
    lane = engine._steps(A)
    slices = maps.cache_map(lane, lane.parts, A, MapQuery())
    engine._call(lambda: next(slices))
    run(engine, GenerateRequest((*IDS[:30], 9, 9), GREEDY, A))
    with pytest.raises(Conflict, match="changed"):
        engine._call(lambda: run_through(slices))


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "int8", "int4", "fp8"])
def test_stored_values_stand_beside_the_exact_ones(kv_format):
    for engine in started(kv_format=kv_format):
        found = engine.cached_values(A, ValueQuery("k", 1, 1, 57))
        rows = rows_of(engine, 1)
        assert found["source"] == "stored" and found["token_id"] == IDS[57] and found["kv_format"] == kv_format
        assert found["stored"] == pytest.approx(rows[0, 57, 1].tolist(), abs=1e-5)
        # Rounding the exact values as the store does gives what is stored.
        value = engine.cached_values(A, ValueQuery("v", 1, 1, 57))
        exact = torch.tensor([found["exact"], value["exact"]])[:, None, None].expand(-1, 1, rows.shape[2], -1)
        again = stored_rows(engine).requantised(1, exact.contiguous())[0, 0, 1]
        step = max(found["max_error"], 1e-4)
        assert (again - torch.tensor(found["stored"])).abs().max() <= 2 * step
        assert (again - torch.tensor(found["stored"])).abs().mean() <= 0.25 * step + 1e-5
        limit = {"fp32": 1e-5, "fp16": 2e-3, "int8": 0.03, "int4": 0.3, "fp8": 0.1}[kv_format]
        assert (0 if kv_format == "fp32" else 1e-6) <= found["relative_error"] <= limit


def test_exact_values_are_those_of_a_float32_run_where_the_cache_is_exact(engine):
    """Where nothing was rounded before, both ways to the exact values give the same."""
    lane = engine._steps(A)
    for position in (0, 3, 44, 75):
        found = engine.cached_values(A, ValueQuery("v", 0, 0, position))
        assert found["exact"] == pytest.approx(found["stored"], abs=1e-4)
    rows = rows_of(engine, 0)[:, 20:21] + 1.0
    engine._call(lambda: write_rows(lane.parts.cache, lane.scheduler.find(A), 0, [20], rows))
    damaged = engine.cached_values(A, ValueQuery("v", 0, 0, 20))
    assert damaged["max_error"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("options", [{"kind": "bamba"}, {"kind": "qwen2", "window": 16, "sinks": 4}])
def test_where_it_can_not_go_on_from_the_cache_all_ids_are_run_again(options):
    for engine in started(kv_format="int8", **options):
        last = engine.inspect(A)["cache_pos"] - 1
        found = engine.cached_values(A, ValueQuery(position=last - 12 if "window" in options else 40))
        assert found["source"] == "ids" and "all tokens" in found["sentence"]
        assert found["relative_error"] < 0.1


def test_a_block_tells_its_text_and_who_wrote_it(engine):
    report = engine.inspect(A)
    other = (*report["token_ids"], 65, 66, 67, 68, 69)
    run(engine, GenerateRequest(other, GREEDY, A))
    engine.audit(A)
    text = engine.tokenizer.token_text
    first, last = engine.block(A, 0), engine.block(A, engine.inspect(A)["blocks"][-2]["start"])
    assert first["text"] == "".join(map(text, IDS[:BLOCK])) and first["count"] == BLOCK
    assert (first["turn"], last["turn"], last["turns"]) == (1, 2, 2)
    assert first["last_audit"]["verdict"] == "clean" and first["tier"] == "ram" and first["ref_count"] == 1
    with pytest.raises(InvalidRequest, match="begins at position 3"):
        engine.block(A, 3)


def test_a_block_on_disk_tells_its_text(tmp_path):
    for engine in started(data_dir=tmp_path, snapshot_limit=2**30):
        engine.snapshot(A)
    engine = tiny_engine(block_size=BLOCK, data_dir=tmp_path, snapshot_limit=2**30)
    try:
        block = engine.block(A, 8)
        assert block["text"] == "".join(map(engine.tokenizer.token_text, IDS[8:12]))
        assert block["tier"] in ("disk", "ram") and block["count"] == BLOCK
    finally:
        engine.close()
