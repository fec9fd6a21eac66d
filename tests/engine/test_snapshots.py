"""Sessions keep their cache over a restart: bit for bit, checked before use, and told where it can't be used."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.debugging.protocol import ProbeQuery
from engine.errors import Conflict, InvalidRequest, NotFound, StorageFailed
from engine.kv_cache.durable import write_durably
from engine.protocol import Finished, GenerateRequest
from engine.sampling.params import SamplingParams
from engine.tiers import fingerprint as fingerprints
from engine.tiers import snapshots
from tests.support.chats import BLOCK, finished, tiny_chat
from tests.support.engines import ENDLESS, LONG_CONTEXT, RecordingEngine, run, tiny_engine
from tests.support.fake_engine import wait_until
from tests.support.tiny_tokenizer import LLAMA3, chat_tokenizer

A, B, C = (str(uuid.UUID(int=number)) for number in (1, 2, 3))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, top_logprobs=5)
KINDS = ["llama", "bamba", "mamba2"]
"""Attention, attention and recurrence, recurrence."""
PROMPT = tuple((7 * index) % 200 + 20 for index in range(100))
MIB = 2**20


@contextmanager
def engine_over(folder: Path, **options: Any) -> Iterator[RecordingEngine]:
    engine = tiny_engine(**{"data_dir": folder, "snapshot_limit": 64 * MIB, **options})
    try:
        yield engine
        engine.check_integrity()
    finally:
        engine.close()


def turn(engine: RecordingEngine, session: str, prompt: tuple[int, ...], **request: Any) -> Finished:
    last = run(engine, GenerateRequest(prompt, GREEDY, session, **request))[-1]
    assert isinstance(last, Finished), last
    return last


def saved(engine: RecordingEngine, session: str) -> dict[str, Any]:
    """The snapshot once what the last turn brought is in it."""
    engine.check_integrity()
    assert wait_until(lambda: not engine._call(lambda: engine._steps().keeper.has_unsaved))
    assert engine._snapshots.writer.wait(session, 10) is None
    return engine.snapshot_info(session)


def contents(engine: RecordingEngine, session: str) -> dict[str, torch.Tensor]:
    """All cached values of a session, up to `cache_pos`, and its recurrent state there."""

    def read() -> dict[str, torch.Tensor]:
        loop = engine._steps()
        sequence = loop.scheduler.find(session)
        loop.runner.sync_blocks()
        cache, state = loop.runner.cache, sequence.state
        return ({} if state is None else loop.runner.states.export_state(state.held.slot)) | {
            f"{kind} {layer} {head}": cache.read(sequence.block_tables, layer, head, kind, 0, sequence.cache_pos)
            for kind in "kv"
            for layer in range(cache.spec.num_layers)
            for head in range(cache.spec.num_kv_heads)
        }

    return engine._call(read)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def in_use(engine: RecordingEngine) -> tuple[int, int]:
    """Blocks, and bytes of recurrent states."""
    memory = engine.memory()
    return memory["blocks_used"], memory["state_used"]


def logprobs(engine: RecordingEngine, session: str | None, prompt: tuple[int, ...]) -> list[Any]:
    events = run(engine, GenerateRequest(prompt, GREEDY, session))
    return [event.logprobs for event in events[:-1] if getattr(event, "logprobs", None)]


@pytest.mark.parametrize(
    "options",
    [{"kv_format": name} for name in ("fp32", "fp16", "bf16")] + [{"kind": kind} for kind in KINDS[1:]],
    ids=str,
)
def test_a_restored_session_goes_on_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    with engine_over(tmp_path / "a", **options) as engine:
        first = turn(engine, A, PROMPT)
        saved(engine, A)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        before = contents(engine, A)
        going_on = (*PROMPT, *first.token_ids, 33, 34, 35)
        expected = logprobs(engine, A, going_on)
        stats = turn(engine, B, going_on).stats
    with engine_over(tmp_path / "b", **options) as engine:
        assert engine.restore(A) == first.stats.cache_pos == len(PROMPT) + 23
        assert same(contents(engine, A), before)
        report = engine.inspect(A)
        assert report["cache_pos"] == first.stats.cache_pos and all(report["invariants"].values())
        assert all(block["written_by_turn"] is not None for block in report["blocks"])
        assert bool(report["blocks"]) == (options.get("kind") != "mamba2") and report["away"] is None
        assert logprobs(engine, A, going_on) == expected, "greedy ids and log probabilities, bit for bit"
        assert stats.reused_tokens > len(PROMPT)


@pytest.mark.parametrize("kind", KINDS)
def test_the_turn_after_a_restart_reuses_all_that_was_cached(tmp_path: Path, kind: str) -> None:
    """C25: the file was read, the right count shown, and the whole prompt was evaluated all the same."""
    with engine_over(tmp_path, kind=kind) as engine:
        assert not engine.capabilities()["warnings"]
        first = turn(engine, A, PROMPT)
    with engine_over(tmp_path, kind=kind) as engine:
        last = turn(engine, A, (*PROMPT, *first.token_ids, 33, 34), stored_cache_pos=first.stats.cache_pos)
        stats = last.stats
        assert (stats.reused_tokens, stats.computed_tokens, stats.miss) == (len(PROMPT) + 23, 3, None)
        assert engine.metrics()["tokens"]["computed"] == 3
        edited = (*PROMPT[:40], 99, *PROMPT[41:])
        after_edit = logprobs(engine, A, edited)
    with engine_over(tmp_path / "fresh", kind=kind, snapshot_limit=0) as fresh:
        assert [[lp.token_id for lp in step] for step in logprobs(fresh, None, edited)] == [
            [lp.token_id for lp in step] for step in after_edit
        ]
        for left, right in zip(logprobs(fresh, None, edited), after_edit, strict=True):
            assert [lp.logprob for lp in left] == pytest.approx([lp.logprob for lp in right], abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_work_after_a_restart_is_measured_not_told(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C25: as counted by the tokens that the model was given. A state is kept on the way, at a block boundary."""
    with engine_over(tmp_path, kind=kind) as engine:
        first = turn(engine, A, PROMPT)
    with engine_over(tmp_path, kind=kind) as engine:
        runner = engine._steps().runner
        ran, execute = [], runner.execute
        monkeypatch.setattr(runner, "execute", lambda *step: ran.append(step[0].token_count) or execute(*step))
        turn(engine, A, (*PROMPT, *first.token_ids, 33, 34))
    audit = 0 if kind == "mamba2" else ran.pop(0)
    prefill = ran[:-23]
    assert audit <= 3 * BLOCK and prefill == ([3] if kind == "llama" else [1, 2]) and ran[-23:] == [1] * 23


def test_a_restored_prefix_is_shared_with_other_sessions(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        turn(engine, A, PROMPT)
    with engine_over(tmp_path) as engine:
        engine.restore(A)
        stats = turn(engine, B, (*PROMPT[:60], 7, 8)).stats
        assert stats.reused_tokens == 60
        tables = [engine.inspect(session)["block_table"] for session in (A, B)]
        assert tables[0][:15] == tables[1][:15]
        assert engine.inspect(A)["blocks"][3]["ref_count"] == 2


def test_what_another_session_has_already_is_not_stored_twice(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        turn(engine, A, PROMPT)
    with engine_over(tmp_path) as engine:
        turn(engine, B, PROMPT[:50])
        used = engine.metrics()["blocks_used"]
        assert engine.restore(A) == len(PROMPT) + 23
        held = len(engine.inspect(A)["block_table"])
        assert engine.metrics()["blocks_used"] == used + held - 12
        turn(engine, A, (*PROMPT, 1))
        assert engine.snapshot(A)["tokens"] == len(PROMPT) + 24


def test_looking_restores_into_free_blocks(tmp_path: Path) -> None:
    """C31: after a restart the page showed an empty cache until the first turn."""
    with engine_over(tmp_path) as engine:
        first = turn(engine, A, PROMPT)
        before = engine.probe(A, ProbeQuery())
    with engine_over(tmp_path) as engine:
        report = engine.inspect(A)
        assert report["cache_pos"] == first.stats.cache_pos and report["away"] is None
        assert engine.probe(A, ProbeQuery()) == before
        assert engine.cached_prefix(A, (*PROMPT, 5)) == len(PROMPT)
    with engine_over(tmp_path) as engine:
        assert engine.cached_prefix(A, (*PROMPT, 5)) == len(PROMPT), "the price of a turn is known before it"


@pytest.mark.parametrize("kind", KINDS)
def test_without_room_looking_says_on_disk_and_a_turn_takes_it(tmp_path: Path, kind: str) -> None:
    options = {"kind": kind, "blocks": 60, "states": 3}
    with engine_over(tmp_path, **options) as engine:
        first = turn(engine, A, PROMPT)
    with engine_over(tmp_path, **options) as engine:
        turn(engine, B, tuple(range(20, 140)))
        report = engine.inspect(A)
        assert (report["cache_pos"], report["block_table"]) == (0, [])
        assert report["away"] == {"tier": "disk", "tokens": first.stats.cache_pos}
        if kind != "mamba2":
            assert {block["tier"] for block in report["blocks"]} == {"disk"}
            assert sum(block["count"] for block in report["blocks"]) == first.stats.cache_pos
        stats = turn(engine, A, (*PROMPT, *first.token_ids, 33)).stats
        assert stats.reused_tokens == first.stats.cache_pos
        if kind != "mamba2":
            assert engine.inspect(B)["away"]["tier"] == "disk"


def test_a_later_turn_adds_its_blocks_and_rewrites_none(tmp_path: Path) -> None:
    folder, before = tmp_path / "snapshots" / A, {}
    with engine_over(tmp_path) as engine:
        prompt = PROMPT
        for count in range(1, 4):
            prompt = (*prompt, *turn(engine, A, prompt).token_ids, 40 + count)
            info = saved(engine, A)
            assert info["files"] == count + 1 and info["tokens"] == len(prompt) - 2
            segments = {path.name: path.stat().st_mtime_ns for path in folder.glob("segment-*")}
            assert before.items() <= segments.items()
            before = segments
        size = info["bytes"]
    with engine_over(tmp_path) as engine:
        turn(engine, A, prompt)
        info = saved(engine, A)
        segments = {path.name: path.stat().st_mtime_ns for path in folder.glob("segment-*")}
        assert before.items() <= segments.items(), "also after a restart"
        turn(engine, A, (*PROMPT[:30], 7, 7, 7))
        assert saved(engine, A)["bytes"] < size / 2, "a cut gives the disk back"
    with engine_over(tmp_path) as engine:
        assert engine.restore(A) == 30 + 3 + 23


def test_a_killed_app_has_what_the_last_turn_left(tmp_path: Path) -> None:
    """No clean stop: what is on disk a moment after the turn is all there is."""
    with engine_over(tmp_path / "a") as engine:
        first = turn(engine, A, PROMPT)
        saved(engine, A)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    with engine_over(tmp_path / "b") as engine:
        assert engine.restore(A) == first.stats.cache_pos


def test_a_busy_engine_saves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tiers.keeper.BUSY_WAIT_S", 0.0)
    with engine_over(tmp_path, context=LONG_CONTEXT) as engine:
        endless = engine.generate(GenerateRequest(PROMPT[:5], ENDLESS, B))
        turn(engine, A, PROMPT)
        assert wait_until(lambda: A in engine.stored_sessions())
        assert engine._steps().scheduler.running, "while another reply was being written"
        with pytest.raises(Conflict):
            engine.snapshot(B)
        endless.cancel()
        list(endless)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_copy_that_is_due_does_not_overwrite_a_state_that_came_back(tmp_path: Path, kind: str) -> None:
    """A reply that is being written leaves a checkpoint, whose copy waits for the next step; its slot may go before."""
    options = {"kind": kind, "states": 3}
    with engine_over(tmp_path, **options) as engine:
        turn(engine, A, PROMPT)
        before = contents(engine, A)
    with engine_over(tmp_path, **options) as engine:
        turn(engine, B, PROMPT[::-1])
        stored = engine._snapshots.load(A, engine._steps().fingerprint())

        def come_back_while_it_is_due() -> None:
            checkpoints = engine._steps().prefix_cache.checkpoints
            held, left = sorted(checkpoints, key=checkpoints.is_held, reverse=True)
            assert not checkpoints.slots.free_count and not checkpoints.is_held(left)
            checkpoints.slots.pending_copies.append((held.slot, left.slot))
            engine._steps().adopt(A, stored, displacing=True)

        engine._call(come_back_while_it_is_due)
        assert engine.inspect(A)["cache_pos"] == len(PROMPT) + 23
        assert same(contents(engine, A), before)


# -- refused ----------------------------------------------------------------------------------------------------------


def flip(folder: Path) -> None:
    path = max(folder.glob("segment-*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(folder: Path) -> None:
    path = next(iter(folder.glob("segment-*")))
    os.truncate(path, path.stat().st_size // 2)


def empty(folder: Path) -> None:
    os.truncate(next(iter(folder.glob("segment-*"))), 0)


def no_manifest_left(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 10)


def flip_state(folder: Path) -> None:
    path = next(folder.glob("state-*"))
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def no_state(folder: Path) -> None:
    next(folder.glob("state-*")).unlink()


DAMAGES = {flip: "block .* damaged", cut: "bytes in place of", empty: "0 bytes", no_manifest_left: "manifest"}


STATE_DAMAGES = {flip_state: "recurrent state is damaged: its digest", no_state: "state-.* can't be read"}


@pytest.mark.parametrize(
    ("kind", "damage", "sentence"),
    [("llama", *item) for item in DAMAGES.items()]
    + [(kind, *item) for kind in KINDS[1:] for item in STATE_DAMAGES.items()],
)
def test_a_damaged_snapshot_is_refused_and_no_live_session_notices(
    tmp_path: Path, kind: str, damage, sentence: str, caplog
) -> None:
    with engine_over(tmp_path, kind=kind) as engine:
        first = turn(engine, A, PROMPT)
    damage(tmp_path / "snapshots" / A)
    with engine_over(tmp_path, kind=kind) as engine:
        live = turn(engine, B, PROMPT[10:70])
        going_on = (*PROMPT[10:70], *live.token_ids, 9)
        before, used = contents(engine, B), in_use(engine)
        assert engine.restore(A) == 0
        assert same(contents(engine, B), before) and in_use(engine) == used
        refused = engine.inspect(A)["refused"]
        assert re.search(sentence, refused) and str(tmp_path) not in refused
        assert sum(refused in record.getMessage() for record in caplog.records) == 1
        after = logprobs(engine, B, going_on)
        stats = turn(engine, A, PROMPT, stored_cache_pos=first.stats.cache_pos).stats
        assert (stats.reused_tokens, stats.miss.cause, stats.miss.tokens_lost) == (0, "snapshot", first.stats.cache_pos)
        assert saved(engine, A)["refused"] is None
        assert engine.inspect(A)["refused"] is None
    with engine_over(tmp_path / "twin", kind=kind, snapshot_limit=0) as twin:
        turn(twin, B, PROMPT[10:70])
        assert logprobs(twin, B, going_on) == after, "the live session's next logits are bit-identical"
    with engine_over(tmp_path, kind=kind) as engine:
        assert engine.restore(A) == first.stats.cache_pos, "what was computed again is kept again"


OTHERS = {
    "weights": {"kind": "qwen2"},
    "KV format": {"kv_format": "fp16"},
    "block size": {"block_size": 8},
    "chat template": {"tokenizer": chat_tokenizer(LLAMA3)},
}


@pytest.mark.parametrize("field", list(OTHERS))
def test_another_models_snapshot_is_refused_naming_the_field(tmp_path: Path, field: str) -> None:
    with engine_over(tmp_path) as engine:
        turn(engine, A, PROMPT)
    with engine_over(tmp_path, **OTHERS[field]) as engine:
        assert engine.restore(A) == 0
        assert f"The snapshot's {field} is " in engine.inspect(A)["refused"]
        stats = turn(engine, A, PROMPT, stored_cache_pos=50, cause="model" if field == "weights" else None).stats
        assert stats.miss.cause == ("model" if field == "weights" else "snapshot") and stats.reused_tokens == 0


@pytest.mark.parametrize("field", ["RoPE", "engine version", "tokenizer", "weight format", "recurrent state"])
def test_every_other_field_of_the_fingerprint_counts(tmp_path: Path, field: str, monkeypatch) -> None:
    options = {"kind": "bamba" if field == "recurrent state" else "llama"}
    with engine_over(tmp_path, **options) as engine:
        turn(engine, A, PROMPT)
        assert field in saved(engine, A)["fingerprint"]
    real = fingerprints.fingerprint
    monkeypatch.setattr("engine.lane.fingerprint", lambda parts: {**real(parts), field: "another"})
    with engine_over(tmp_path, **options) as engine:
        assert engine.restore(A) == 0 and f"The snapshot's {field} is " in engine.inspect(A)["refused"]


def test_another_template_while_running_refuses_and_writes_anew(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        turn(engine, A, PROMPT)
        before = saved(engine, A)["fingerprint"]["chat template"]
        engine.use_template("plain")
        turn(engine, A, (*PROMPT, 5))
        assert saved(engine, A)["fingerprint"]["chat template"] != before
        assert engine.snapshot_info(A)["tokens"] == len(PROMPT) + 24
        engine.use_template("chatml")
        assert engine.snapshot(A)["fingerprint"] == engine._steps().fingerprint(), "without a turn in between, too"


def test_a_snapshot_asked_for_is_never_the_older_one(tmp_path: Path) -> None:
    """A write found the earlier blocks gone, and the engine had not yet brought all of them when it was asked."""
    with engine_over(tmp_path) as engine, ThreadPoolExecutor(1) as pool:
        turn(engine, A, PROMPT)
        assert saved(engine, A)["tokens"] == len(PROMPT) + 23
        engine.use_template("plain")
        writer, asked = engine._snapshots.writer, []
        tell, writer._on_failed = writer._on_failed, lambda *what: asked.append(what)
        turn(engine, A, (*PROMPT, 5))
        assert wait_until(lambda: asked == [(A, True)])
        answer = pool.submit(engine.snapshot, A)
        with pytest.raises(FutureTimeout):
            answer.result(0.2)
        tell(*asked[0])
        assert answer.result(10)["tokens"] == len(PROMPT) + 24


@pytest.mark.parametrize(("kind", "index"), [("llama", 4), ("bamba", 0)])
def test_wrong_values_that_verify_are_found_by_the_spot_audit(tmp_path: Path, kind: str, index: int) -> None:
    """A snapshot that is whole, with the right fingerprint, of other tokens than its ids say."""
    with engine_over(tmp_path, kind=kind) as engine:
        turn(engine, A, PROMPT)
        saved(engine, A)

        def damage() -> None:
            loop = engine._steps()
            table = loop.scheduler.find(A).block_table
            loop.runner.cache.copy_blocks([(table[20], table[index])])
            loop.keeper.not_saved(A, True)

        engine._call(damage)
        saved(engine, A)
    with engine_over(tmp_path, kind=kind) as engine:
        used = in_use(engine)
        assert engine.restore(A) == 0 and in_use(engine) == used
        assert "differ from what the model computes there" in engine.inspect(A)["refused"]
        stats = turn(engine, A, PROMPT, stored_cache_pos=100).stats
        assert stats.miss.cause == "snapshot" and stats.reused_tokens == 0


def not_finite(keeper: Any, sequence: Any) -> dict[str, torch.Tensor]:
    state = keeper._runner.states.export_state(sequence.state.held.slot)
    state["ssm"][1, 2, 3, 4] = torch.nan
    return state


def of_another_shape(keeper: Any, sequence: Any) -> dict[str, torch.Tensor]:
    state = keeper._runner.states.export_state(sequence.state.held.slot)
    return {**state, "conv": state["conv"][:, :-1].contiguous()}


def none_at_all(keeper: Any, sequence: Any) -> None:
    return None


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize(
    ("state", "sentence"), [(not_finite, "not finite"), (of_another_shape, "must be"), (none_at_all, "lacks")]
)
def test_a_state_that_verifies_and_cannot_be_is_refused_with_its_blocks(
    tmp_path: Path, kind: str, state, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, engine_over(tmp_path, kind=kind) as engine:
        patch.setattr("engine.tiers.keeper.SessionKeeper._state", state)
        turn(engine, A, PROMPT)
    with engine_over(tmp_path, kind=kind) as engine:
        if (kind, state) == ("mamba2", none_at_all):
            assert engine.stored_sessions() == [], "without a state there is nothing"
            return
        used = in_use(engine)
        assert engine.restore(A) == 0 and in_use(engine) == used
        assert sentence in engine.inspect(A)["refused"]
        stats = turn(engine, A, PROMPT, stored_cache_pos=100).stats
        assert stats.miss.cause == "snapshot" and stats.reused_tokens == 0


# -- the disk ---------------------------------------------------------------------------------------------------------


def test_on_a_full_disk_the_chat_goes_on_with_one_line_in_the_log(tmp_path: Path, caplog) -> None:
    full = False

    def write(path: Path, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_durably(path, data)

    with engine_over(tmp_path) as engine:
        engine._snapshots.store._write = write
        first = turn(engine, A, PROMPT)
        before, full = saved(engine, A), True
        prompt = (*PROMPT, *first.token_ids, 33)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                prompt = (*prompt, *turn(engine, A, prompt).token_ids, 34)
                assert wait_until(lambda: not engine._call(lambda: engine._steps().keeper.has_unsaved))
                assert "No space left" in engine._snapshots.writer.wait(A, 10)
        assert len(caplog.records) == 1 and str(tmp_path) not in caplog.text
        assert engine.snapshot_info(A)["tokens"] == before["tokens"], "the old snapshot stays"
        with pytest.raises(StorageFailed, match="No space left"):
            engine.snapshot(A)
        full = False
        assert engine.snapshot(A)["tokens"] == len(prompt) - 2
    with engine_over(tmp_path) as engine:
        assert engine.restore(A) == len(prompt) - 2


def test_what_the_limit_pushed_out_is_written_again(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        turn(engine, A, PROMPT)
        size = saved(engine, A)["bytes"]
    with engine_over(tmp_path, snapshot_limit=int(1.5 * size)) as engine:
        assert engine.inspect(A)["cache_pos"]
        turn(engine, B, PROMPT[::-1])
        saved(engine, B)
        assert engine.stored_sessions() == [B] and engine.memory()["kv_disk"] <= 1.5 * size
        turn(engine, A, (*PROMPT, 4))
        assert saved(engine, A)["tokens"] == len(PROMPT) + 24 and engine.stored_sessions() == [A]
        assert engine.snapshot(B)["tokens"] == len(PROMPT) + 23
        turn(engine, A, (*PROMPT, 6))
    with engine_over(tmp_path) as engine:
        assert engine.restore(A) == len(PROMPT) + 24, "also what found its earlier blocks gone while closing"


def test_what_is_in_ram_and_not_on_disk_is_written_when_asked_for(tmp_path: Path) -> None:
    """Blocks of 4 tokens: a session of 123 tokens takes 31; the pool has room for one, RAM too, the disk too."""
    with engine_over(tmp_path, blocks=60, ram_limit=40 * 2048, snapshot_limit=100_000) as engine:
        turn(engine, A, PROMPT)
        saved(engine, A)
        turn(engine, B, PROMPT[::-1])
        saved(engine, B)
        assert engine.stored_sessions() == [B] and engine.inspect(A)["away"]["tier"] == "ram"
        assert engine.snapshot(A)["tokens"] == len(PROMPT) + 23 and engine.stored_sessions() == [A]


def test_removed_with_the_session_also_while_the_model_loads(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        for session in (A, B):
            turn(engine, session, PROMPT)
            saved(engine, session)
        engine.release(A)
        assert engine.stored_sessions() == [B] and not (tmp_path / "snapshots" / A).exists()
        engine.fork(B, C, engine.inspect(B)["token_ids"])
        assert engine.snapshot(C)["tokens"] == saved(engine, B)["tokens"]
        before = contents(engine, B)
    with engine_over(tmp_path) as engine:
        engine._state = "loading"
        engine.release(B)
        engine._state = "ok"
        assert engine.stored_sessions() == [C]
        engine.fork(C, A, (*PROMPT, *range(30)))
        assert engine.inspect(A)["cache_pos"] == len(PROMPT), "a fork of what was only on disk"
        assert same(contents(engine, C), before)


def test_the_limit_left_out_is_a_share_of_the_disk_that_does_not_shrink_with_use(tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=8000))
    assert snapshots.default_limit(tmp_path / "not" / "there", 0) == 2000
    assert snapshots.default_limit(tmp_path, 4000) == 3000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**50))
    assert snapshots.default_limit(tmp_path, 0) == snapshots.MOST_BYTES
    with engine_over(tmp_path, snapshot_limit=None) as engine:
        assert engine.capabilities()["snapshot_limit"] == snapshots.MOST_BYTES


def test_written_now_and_asked_for(tmp_path: Path) -> None:
    with engine_over(tmp_path) as engine:
        with pytest.raises(NotFound):
            engine.snapshot(A)
        with pytest.raises(NotFound):
            engine.snapshot_info(A)
        last = turn(engine, A, PROMPT)
        info = engine.snapshot(A)
        assert info["tokens"] == last.stats.cache_pos and info["bytes"] > 0 and info["age_s"] < 10
        assert info["fingerprint"] == engine._steps().fingerprint()
        assert engine.snapshot(A)["created_at"] == info["created_at"], "nothing new, nothing written"
        assert engine.memory()["sessions"][A]["kv_disk"] == info["bytes"]
        assert engine.capabilities()["snapshot_limit"] == 64 * MIB
    with engine_over(tmp_path, snapshot_limit=0) as engine:
        turn(engine, A, PROMPT)
        with pytest.raises(InvalidRequest):
            engine.snapshot(A)
        assert engine.inspect(A)["cache_pos"] and engine.stored_sessions() == []


def test_the_chat_keeps_its_cache_over_a_restart(tmp_path: Path) -> None:
    """C25 and C31 by way of the conversation service: prompt, history, cache and miss all agree."""
    options = {"data_dir": tmp_path, "snapshot_limit": 64 * MIB, "context": 1024}
    with tiny_chat(tmp_path, **options) as chat:
        session = chat.store.create().id
        chat.say(session, "Some filler text. " * 25)
        last = chat.say(session, "And then?").stats
    with tiny_chat(tmp_path, **options) as chat:
        assert chat.engine.inspect(session)["cache_pos"] == last.cache_pos > 450
        assert chat.service.prices.preview(session, "Go on").reused_tokens >= last.cache_pos
        turn_ = chat.service.send(session, "Go on", GREEDY)
        stats = finished(turn_).stats
        assert stats.reused_tokens >= last.cache_pos - BLOCK and stats.miss is None
        chat.assert_cache_is_history(turn_)
        first = chat.store.branch(session).messages[0].id
        edited = chat.service.edit(session, first, "Something else. " * 25, GREEDY)
        finished(edited)
        chat.assert_cache_is_history(edited)
        chat.service.delete_session(session)
        assert not (tmp_path / "snapshots" / session).exists()
