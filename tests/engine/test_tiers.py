"""Idle sessions leave the pool for RAM, then disk, oldest first, and come back by copy; the pool stays dense."""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.compaction import MOST_EMPTY, empty_slots, is_sparse
from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import GenerateRequest
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence
from tests.engine.test_snapshots import KINDS, PROMPT, A, B, C, contents, engine_over, logprobs, same, saved, turn

OTHER = tuple((11 * index) % 200 + 20 for index in range(100))
THIRD = tuple((13 * index) % 200 + 20 for index in range(100))
MIB = 2**20


def tier(engine: Any, session: str) -> str | None:
    away = engine.inspect(session)["away"]
    return away["tier"] if away else "pool" if engine.inspect(session)["cache_pos"] else None


def test_the_oldest_goes_to_ram_then_to_disk_and_comes_back_by_copy(tmp_path: Path) -> None:
    """Blocks of 4 tokens: a session of 123 tokens takes 31, the pool has 79, RAM has room for one session."""
    with engine_over(tmp_path, blocks=80, ram_limit=40 * 2048) as engine:
        block_bytes = engine.memory()["block_bytes"]
        assert block_bytes == 2048
        first = turn(engine, A, PROMPT)
        before = contents(engine, A)
        turn(engine, B, OTHER)
        saved(engine, A), saved(engine, B)
        assert [tier(engine, session) for session in (A, B)] == ["pool", "pool"]
        assert engine.memory()["kv_ram"] == 0
        turn(engine, C, THIRD)
        assert [tier(engine, session) for session in (A, B, C)] == ["ram", "pool", "pool"]
        memory = engine.memory()
        assert memory["kv_ram"] == memory["sessions"][A]["kv_ram"] == 31 * block_bytes
        assert memory["kv_disk"] == sum(part["kv_disk"] for part in memory["sessions"].values()) > 2 * 31 * block_bytes
        report = engine.inspect(A)
        assert report["away"]["tokens"] == first.stats.cache_pos == sum(block["count"] for block in report["blocks"])
        assert {block["tier"] for block in report["blocks"]} == {"ram"}
        going_on = (*PROMPT, *first.token_ids, 5)
        stats = turn(engine, A, going_on).stats
        assert (stats.reused_tokens, stats.computed_tokens) == (first.stats.cache_pos, 2) and stats.miss is None
        after = contents(engine, A)
        assert all(torch.equal(after[name][: len(before[name])], before[name]) for name in before)
        assert [tier(engine, session) for session in (A, B, C)] == ["pool", "ram", "pool"]
        turn(engine, B, (*OTHER, 5))
        assert [tier(engine, session) for session in (A, B, C)] == ["pool", "pool", "ram"]
        turn(engine, C, THIRD)
        turn(engine, str(uuid.UUID(int=9)), tuple(reversed(THIRD)))
        assert [tier(engine, session) for session in (A, B, C)] == ["disk", "ram", "pool"], "the oldest left RAM"
        assert engine.memory()["kv_ram"] <= 40 * block_bytes
        assert engine.restore(A) == len(going_on) + 23


def test_without_ram_and_disk_blocks_go_to_nothing_and_the_miss_says_so(tmp_path: Path) -> None:
    with engine_over(tmp_path, blocks=80, snapshot_limit=0) as engine:
        first = turn(engine, A, PROMPT)
        for session, prompt in ((B, OTHER), (C, THIRD)):
            turn(engine, session, prompt)
        assert tier(engine, A) is None and engine.restore(A) == 0
        turn(engine, str(uuid.UUID(int=9)), tuple(reversed(THIRD)))
        stats = turn(engine, A, (*PROMPT, *first.token_ids, 5)).stats
        assert stats.miss.cause == "evicted" and stats.reused_tokens < first.stats.cache_pos


@pytest.mark.parametrize("kind", KINDS)
def test_what_came_back_from_ram_goes_on_as_if_it_had_never_left(tmp_path: Path, kind: str) -> None:
    """Room for the blocks of two sessions, and for the states of two."""
    with engine_over(tmp_path / "a", kind=kind, blocks=80, states=3, ram_limit=MIB, snapshot_limit=0) as engine:
        first = turn(engine, A, PROMPT)
        for session, prompt in ((B, OTHER), (C, THIRD)):
            turn(engine, session, prompt)
        assert tier(engine, A) == "ram"
        memory, report = engine.memory(), engine.inspect(A)
        assert memory["kv_ram"] == len(report["blocks"]) * memory["block_bytes"] + engine.capabilities()["state_bytes"]
        going_on = (*PROMPT, *first.token_ids, 5)
        assert engine.restore(A) == first.stats.cache_pos
        back = logprobs(engine, A, going_on)
        assert engine.metrics()["tokens"]["computed"] == 3 * len(PROMPT) + 2
    with engine_over(tmp_path / "b", kind=kind, blocks=200, snapshot_limit=0) as engine:
        turn(engine, A, PROMPT)
        assert logprobs(engine, A, going_on) == back


def test_a_turn_that_finds_no_room_for_its_blocks_runs_all_the_same(tmp_path: Path) -> None:
    with engine_over(tmp_path, blocks=60, ram_limit=MIB) as engine:
        first = turn(engine, A, PROMPT)
        prompt = (*OTHER, *THIRD)
        assert turn(engine, B, prompt[:190]).stats.generated_tokens == 24
        stats = turn(engine, A, (*PROMPT, *first.token_ids, 5)).stats
        assert stats.reused_tokens == first.stats.cache_pos
        assert engine.memory()["sessions"][B]["kv_ram"] > 0
        engine.release(B)
        assert engine.memory()["kv_ram"] == 0


def test_a_session_whose_copy_in_ram_makes_room_for_another_comes_back_all_the_same(tmp_path: Path) -> None:
    """RAM has room for one session: bringing it back displaces another one, whose blocks take its place there."""
    with engine_over(tmp_path, blocks=80, ram_limit=40 * 2048) as engine:
        cached = turn(engine, A, PROMPT).stats.cache_pos
        for session, prompt in ((B, OTHER), (C, THIRD)):
            turn(engine, session, prompt)
        assert tier(engine, A) == "ram"
        assert engine.restore(A) == cached and [tier(engine, session) for session in (A, B, C)] == [
            "pool",
            "ram",
            "pool",
        ]
        turn(engine, C, (*THIRD, 3))
        assert engine.restore(A) == cached, "it is not read from the disk into the blocks that it has"


def test_writing_now_what_has_left_the_pool_does_not_hide_it(tmp_path: Path) -> None:
    with engine_over(tmp_path, blocks=80) as engine:
        cached = turn(engine, A, PROMPT).stats.cache_pos
        for session, prompt in ((B, OTHER), (C, THIRD)):
            turn(engine, session, prompt)
        saved(engine, A)
        assert tier(engine, A) == "disk"
        engine._call(lambda: engine._steps().keeper.not_saved(A, True))
        assert engine.snapshot(A)["tokens"] == cached
        assert turn(engine, A, (*PROMPT, 4)).stats.reused_tokens == len(PROMPT)


def test_asking_for_a_session_back_while_it_answers_changes_nothing(tmp_path: Path) -> None:
    with engine_over(tmp_path, blocks=80, ram_limit=MIB) as engine:
        first = turn(engine, A, PROMPT)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        stream = engine.generate(GenerateRequest((*PROMPT, *first.token_ids, 5), params, A))
        for _ in range(20):
            engine.restore(A)
            engine.check_integrity()
        assert list(stream)[-1].stats.generated_tokens == 60


# -- a dense pool ------------------------------------------------------------------------------------------------------


def test_after_a_compaction_the_extents_are_few_and_the_contents_the_same(tmp_path: Path) -> None:
    with engine_over(tmp_path, snapshot_limit=0) as engine:
        cache = engine._steps().runner.cache
        cache.blocks_per_extent = 8
        sessions = [str(uuid.UUID(int=100 + number)) for number in range(6)]
        for number, session in enumerate(sessions):
            turn(engine, session, (number, *PROMPT))
        kept = {session: contents(engine, session) for session in (sessions[2], sessions[5])}
        engine.fork(sessions[5], A, engine.inspect(sessions[5])["token_ids"])
        reserved = engine.memory()["kv_reserved"]
        for session in (*sessions[:2], *sessions[3:5]):
            engine.release(session)
        turn(engine, None, (1, 2, 3))
        engine.check_integrity()
        memory = engine.memory()
        used = memory["blocks_used"]
        assert memory["kv_reserved"] <= (used + 1 + 8) * memory["block_bytes"] < reserved / 2
        assert memory["fragmentation"] == pytest.approx(memory["kv_empty"] / memory["kv_reserved"], abs=1e-4)
        assert memory["fragmentation"] < MOST_EMPTY
        assert all(same(contents(engine, session), before) for session, before in kept.items())
        assert same(contents(engine, A), kept[sessions[5]])
        report = engine.inspect(sessions[5])
        assert max(report["block_table"]) <= used and all(report["invariants"].values())


def test_empty_slots_are_those_without_a_token() -> None:
    cache = PrefixCache(BlockPool(64), 4)
    sequence = Sequence(cache)
    sequence.set_tokens(range(10))
    sequence.reserve(10)
    sequence.advance(10)
    assert empty_slots(cache, [sequence], reserved_blocks=8) == 5 * 4 + 2
    assert is_sparse(cache, reserved_blocks=8, blocks_per_extent=4)
    assert not is_sparse(cache, reserved_blocks=8, blocks_per_extent=8), "no extent would become free"
    assert not is_sparse(cache, reserved_blocks=5, blocks_per_extent=1)


@pytest.mark.parametrize("seed", range(20))
def test_a_compacted_pool_has_no_gap_and_moves_little(seed: int) -> None:
    rng, pool = random.Random(seed), BlockPool(200)
    ids = [pool.allocate() for _ in range(150)]
    for block_id in rng.sample(ids, rng.randint(0, 150)):
        pool.release(block_id)
        ids.remove(block_id)
    moves = pool.compact()
    assert pool.pending_copies == list(moves.items())
    assert all(target < source for source, target in moves.items())
    owners = {moves.get(block_id, block_id): 1 for block_id in ids}
    pool.check_integrity(owners)
    assert sorted(owners) == list(range(1, len(ids) + 1)) and not moves.keys() & set(moves.values())
    assert pool.trim() == len(ids) + 1
