"""Snapshots on disk: what is added, what is removed, what is refused, and that the last whole one always stays."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.kv_cache import segments, snapshot
from engine.kv_cache.durable import write_durably
from engine.kv_cache.manifest import Manifest, SnapshotRefused
from engine.kv_cache.snapshot import MissingBlocks, SnapshotStore, SnapshotTooLarge
from tests.support.snapshots import FINGERPRINT, block, holds, holds_state, job, new_session, state

ROOT = Path(__file__).parents[2]
A, B, C = new_session(1), new_session(2), new_session(3)
GIB = 2**30


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", GIB)


def files(store: SnapshotStore, session_id: str = A) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((store._folder / session_id).iterdir())}


def test_what_is_saved_is_read_bit_for_bit(store: SnapshotStore) -> None:
    store.save(job(A, "xyz"))
    again = SnapshotStore(store._folder, GIB)
    held = again.load(A, FINGERPRINT)
    assert holds(held, "xyz")
    assert (held.cache_pos, held.token_ids) == (10, tuple(range(11)))
    assert held.turns == ("turn of x", "turn of y", "turn of z")
    assert again.load(B, FINGERPRINT) is None and again.sizes() == store.sizes()
    assert store.sizes()[A] == sum(map(len, files(store).values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_every_type_of_block_comes_back(store: SnapshotStore, dtype: torch.dtype) -> None:
    data = torch.randint(0, 255, (1, 2, 4, 2, 8), dtype=torch.uint8).repeat_interleave(dtype.itemsize, -1).view(dtype)
    store.save(replace(job(A, "x"), new={"x": {"data": data}}))
    held = store.load(A, FINGERPRINT)
    assert held.tensors["data"].dtype is dtype
    assert torch.equal(held.tensors["data"][0].view(torch.uint8), data.view(torch.uint8))


def test_a_later_turn_adds_a_file_and_rewrites_none(store: SnapshotStore) -> None:
    store.save(job(A, "abcdx"))
    before = files(store)
    store.save(job(A, "abcdefgy", new="efgy"))
    after = files(store)
    assert {name: data for name, data in after.items() if name in before and name != "manifest.json"} == {
        name: data for name, data in before.items() if name != "manifest.json"
    }
    assert len(after) == len(before) + 1
    assert holds(store.load(A, FINGERPRINT), "abcdefgy")


def test_a_cut_lists_fewer_blocks_and_a_file_without_any_goes(store: SnapshotStore) -> None:
    store.save(job(A, "abcd"))
    store.save(job(A, "abcdefgh", new="efgh"))
    assert len(files(store)) == 3
    store.save(job(A, "abcy", new="y"))
    assert holds(store.load(A, FINGERPRINT), "abcy")
    assert set(files(store)) == {"manifest.json", "segment-000001.safetensors", "segment-000003.safetensors"}


def test_mostly_dead_files_are_written_anew(store: SnapshotStore) -> None:
    keys = [f"k{index}" for index in range(40)]
    store.save(job(A, keys))
    full = store.sizes()[A]
    store.save(job(A, [*keys[:10], "last"], new=["last"]))
    assert holds(store.load(A, FINGERPRINT), [*keys[:10], "last"])
    assert store.sizes()[A] < full / 2 and len(files(store)) == 2
    store.save(job(A, [*keys[:10], "b", "c"], new="bc"))
    assert holds(store.load(A, FINGERPRINT), [*keys[:10], "b", "c"])


def test_many_small_files_become_one(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_SEGMENTS", 4)
    for count in range(1, 6):
        store.save(job(A, "abcde"[:count], new="abcde"[count - 1 : count]))
    assert holds(store.load(A, FINGERPRINT), "abcde") and len(files(store)) == 2


def test_large_jobs_are_cut_into_several_files(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 2 * sum(t.nbytes for t in block("a").values()))
    store.save(job(A, "abcde"))
    assert len(files(store)) == 4 and holds(store.load(A, FINGERPRINT), "abcde")


def test_blocks_of_another_fingerprint_are_not_carried_over(store: SnapshotStore) -> None:
    store.save(job(A, "ab"))
    other = {**FINGERPRINT, "template": "t2"}
    with pytest.raises(MissingBlocks):
        store.save(job(A, "abc", new="c", fingerprint=lambda: other))
    assert holds(store.load(A, FINGERPRINT), "ab")
    store.save(job(A, "abc", fingerprint=lambda: other))
    assert holds(store.load(A, other), "abc")


@pytest.mark.parametrize("name", list(FINGERPRINT))
def test_another_fingerprint_is_refused_naming_the_field(store: SnapshotStore, name: str) -> None:
    store.save(job(A, "ab"))
    with pytest.raises(SnapshotRefused, match=f"^The snapshot's {name} is .*") as refused:
        store.load(A, {**FINGERPRINT, name: "other"})
    assert "other" in str(refused.value) and FINGERPRINT[name] in str(refused.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def missing(path: Path) -> None:
    path.unlink()


def test_a_recurrent_state_is_replaced_by_each_save(store: SnapshotStore) -> None:
    """With blocks beside it, which are added to, and without any."""
    store.save(job(A, "ab", state=state(1)))
    assert holds_state(store.load(A, FINGERPRINT), 1) and holds(store.load(A, FINGERPRINT), "ab")
    store.save(job(A, "abcd", new="cd", state=state(2)))
    assert holds_state(store.load(A, FINGERPRINT), 2) and holds(store.load(A, FINGERPRINT), "abcd")
    assert sum(name.startswith("state-") for name in files(store)) == 1 and len(files(store)) == 4
    assert store.sizes()[A] == sum(map(len, files(store).values()))
    store.remove(A)
    for count in (2, 3):
        store.save(job(A, "", state=state(count), token_ids=tuple(range(count + 1)), cache_pos=count))
        held = store.load(A, FINGERPRINT)
        assert (held.keys, held.tensors, held.cache_pos) == ((), {}, count) and holds_state(
            store.load(A, FINGERPRINT), count
        )
        assert len(files(store)) == 2


def test_a_state_that_waited_gives_way_to_the_newer_one() -> None:
    both = job(A, "abc", new="c", state=state(2)).after(job(A, "ab", state=state(1)))
    assert both.new.keys() == {"a", "b", "c"} and torch.equal(both.state["ssm"], state(2)["ssm"])


def test_a_state_that_is_replaced_needs_no_room_of_its_own(tmp_path: Path) -> None:
    first = SnapshotStore(tmp_path / "snapshots", GIB)
    first.save(job(A, "", state=state(1), token_ids=(1, 2), cache_pos=1))
    store = SnapshotStore(tmp_path / "snapshots", int(1.2 * first.sizes()[A]))
    store.save(job(A, "", state=state(2), token_ids=(1, 2, 3), cache_pos=2))
    assert holds_state(store.load(A, FINGERPRINT), 2) and store.sizes()[A] <= store.limit


@pytest.mark.parametrize("files_before_it_is_full", [0, 1, 2])
def test_on_a_full_disk_the_old_state_stays_with_its_blocks(tmp_path: Path, files_before_it_is_full: int) -> None:
    """It may fail at the new blocks, the new state or the manifest."""
    left = 100

    def write(path: Path, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_durably(path, data)

    store = SnapshotStore(tmp_path / "snapshots", GIB, write)
    store.save(job(A, "ab", state=state(1)))
    before, left = files(store), files_before_it_is_full
    with pytest.raises(OSError, match="No space"):
        store.save(job(A, "abcd", new="cd", state=state(2)))
    assert (
        files(store) == before
        and holds_state(store.load(A, FINGERPRINT), 1)
        and holds(store.load(A, FINGERPRINT), "ab")
    )


@pytest.mark.parametrize("damage", [cut, empty, longer, missing])
def test_a_damaged_state_is_refused(store: SnapshotStore, damage) -> None:
    store.save(job(A, "ab", state=state(1)))
    damage(next((store._folder / A).glob("state-*")))
    with pytest.raises(SnapshotRefused, match="file state-000002"):
        store.load(A, FINGERPRINT)
    store.save(job(A, "ab", new="", state=state(2)))
    assert holds_state(store.load(A, FINGERPRINT), 2)


@pytest.mark.parametrize("name", ["segment-000001.safetensors", "segment-000002.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, empty, longer, missing])
def test_damaged_files_are_refused(store: SnapshotStore, name: str, damage) -> None:
    store.save(job(A, "abcd"))
    store.save(job(A, "abcdef", new="ef"))
    damage(store._folder / A / name)
    if (name, damage) == ("manifest.json", missing):
        assert store.load(A, FINGERPRINT) is None
    else:
        with pytest.raises(SnapshotRefused, match=r"manifest|file segment-00000[12]"):
            store.load(A, FINGERPRINT)
    store.save(job(A, "ghi"))
    assert holds(store.load(A, FINGERPRINT), "ghi"), "what is computed anew is kept anew"


def test_every_flipped_byte_is_noticed_or_without_effect(store: SnapshotStore) -> None:
    """One byte at a time, all over each file: refused, or read as it was written (a dead byte of a header)."""
    store.save(job(A, "ab", state=state(1)))
    for name in ("manifest.json", "segment-000001.safetensors", "state-000002.safetensors"):
        path = store._folder / A / name
        good = path.read_bytes()
        refused = 0
        for position in range(0, len(good), 7):
            path.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
            try:
                assert holds(store.load(A, FINGERPRINT), "ab") and holds_state(store.load(A, FINGERPRINT), 1)
            except SnapshotRefused:
                refused += 1
        path.write_bytes(good)
        assert refused > 0.9 * len(range(0, len(good), 7))
    assert holds(store.load(A, FINGERPRINT), "ab")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cache_pos": 3}, "counts contradict"),
        ({"cache_pos": 9}, "counts contradict"),
        ({"cache_pos": 0}, "counts contradict"),
        ({"block_size": 8}, "counts contradict"),
        ({"block_size": 0}, "counts contradict"),
        ({"token_ids": (1, 2)}, "counts contradict"),
        ({"segments": {"../other": 5}}, "none of its own"),
        ({"segments": {}}, "lies in no file"),
        ({"tensors": {"data": ("float64", (1,))}}, "a type of tensor"),
        ({"tensors": {"data": ("float16", (2, 2, 4, 2, 4))}}, "other tensors than its manifest"),
        ({"row": 5}, "lacks block 1"),
    ],
)
def test_counts_that_contradict_are_refused(store: SnapshotStore, changes: dict, sentence: str) -> None:
    """Also where the manifest's own digest is right."""
    store.save(job(A, "ab"))
    manifest = store.manifest(A)
    if "row" in changes:
        changes = {"blocks": (manifest.blocks[0], replace(manifest.blocks[1], **changes))}
    (store._folder / A / "manifest.json").write_bytes(replace(manifest, **changes).to_bytes())
    with pytest.raises(SnapshotRefused, match=sentence):
        store.load(A, FINGERPRINT)


def test_another_version_is_refused(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv_cache.manifest.VERSION", 0)
    store.save(job(A, "ab"))
    monkeypatch.undo()
    with pytest.raises(SnapshotRefused, match="another version"):
        store.load(A, FINGERPRINT)
    assert json.loads(files(store)["manifest.json"])["version"] == 0
    with pytest.raises(SnapshotRefused):
        Manifest.from_bytes(b"[1]")


class Disk:
    """Has room for so many more bytes."""

    def __init__(self, room: float = float("inf")) -> None:
        self.room = room

    def write(self, path: Path, data: bytes) -> None:
        self.room -= len(data)
        if self.room < 0:
            path.with_name(".tmp-" + path.name).write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_durably(path, data)


@pytest.mark.parametrize("room", [0, 100, 4_000, 4_500])
def test_on_a_full_disk_the_old_snapshot_stays(tmp_path: Path, room: int) -> None:
    disk = Disk()
    store = SnapshotStore(tmp_path / "snapshots", GIB, disk.write)
    store.save(job(A, "abc"))
    before, disk.room = files(store), room
    with pytest.raises(OSError, match="No space"):
        store.save(job(A, "abcdefghij", new="defghij"))
    assert files(store) == before and holds(store.load(A, FINGERPRINT), "abc")
    disk.room = float("inf")
    store.save(job(A, "abcdefghij", new="defghij"))
    assert holds(store.load(A, FINGERPRINT), "abcdefghij")


def test_a_failure_behind_the_manifest_leaves_the_new_snapshot_whole(store: SnapshotStore, monkeypatch) -> None:
    store.save(job(A, "abc"))

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(snapshot, "sync_folder", fail)
    with pytest.raises(OSError, match="Input/output"):
        store.save(job(A, "abcde", new="de"))
    assert holds(store.load(A, FINGERPRINT), "abcde")


def test_sizes_are_known_while_a_write_is_under_way(store: SnapshotStore) -> None:
    store.save(job(A, "abc"))
    known, seen = store.sizes(), []

    def write(path: Path, data: bytes) -> None:
        reader = threading.Thread(target=lambda: seen.append(store.sizes()))
        reader.start()
        reader.join(5)
        write_durably(path, data)

    store._write = write
    store.save(job(A, "abcde", new="de"))
    assert seen == [known, known]


def test_a_full_disk_while_dead_blocks_are_cleared_out_costs_nothing(tmp_path: Path) -> None:
    disk = Disk()
    store = SnapshotStore(tmp_path / "snapshots", GIB, disk.write)
    keys = [f"k{index}" for index in range(40)]
    store.save(job(A, keys))
    disk.room = 7_000
    store.save(job(A, [*keys[:10], "last"], new=["last"]))
    assert disk.room < 0 and holds(store.load(A, FINGERPRINT), [*keys[:10], "last"])
    assert len(files(store)) == 3


def test_the_least_recently_used_session_goes_first(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    SnapshotStore(folder, GIB).save(job(A, "abcd"))
    size = SnapshotStore(folder, GIB).sizes()[A]
    store = SnapshotStore(folder, int(3.5 * size))
    for number, session in enumerate((B, C)):
        store.save(job(session, "abcd"))
        os.utime(folder / session / "manifest.json", (10**9 + number,) * 2)
    os.utime(folder / A / "manifest.json", (10**9 - 1,) * 2)
    store = SnapshotStore(folder, int(3.5 * size))
    assert list(store.sizes()) == [A, B, C]
    store.load(A, FINGERPRINT)
    store = SnapshotStore(folder, int(3.5 * size))
    assert list(store.sizes()) == [B, C, A], "what was used last is known after a restart"
    store.save(job(new_session(4), "abcd"))
    assert list(store.sizes()) == [C, A, new_session(4)]
    assert sum(store.sizes().values()) <= store.limit and not (folder / B).exists()
    with pytest.raises(SnapshotTooLarge):
        store.save(job(B, [f"k{index}" for index in range(40)]))
    assert list(store.sizes()) == [C, A, new_session(4)], "what can't be kept pushes nothing out"


def test_removed_with_the_session(store: SnapshotStore) -> None:
    for session in (A, B, C):
        store.save(job(session, "ab"))
    store.remove(A)
    store.remove(A)
    assert not (store._folder / A).exists() and store.load(A, FINGERPRINT) is None
    store.keep_only([C])
    assert list(store.sizes()) == [C] and [path.name for path in store._folder.iterdir()] == [C]


def test_what_a_broken_off_removal_left_is_cleared_away(store: SnapshotStore) -> None:
    store.save(job(A, "ab"))
    (store._folder / A / "manifest.json").unlink()
    assert SnapshotStore(store._folder, GIB).sizes() == {} and not (store._folder / A).exists()


@pytest.mark.parametrize("name", ["a", "../a", "", A.upper().replace("0", "A"), A + "/.."])
def test_only_ids_of_sessions_name_folders(store: SnapshotStore, name: str) -> None:
    store.save(job(name, "ab"))
    store.remove(name)
    assert store.load(name, FINGERPRINT) is None and not store._folder.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its writers")
def test_killed_at_fifty_random_moments_of_a_write(tmp_path: Path) -> None:
    """Each time the last whole snapshot verifies, none older than the one before, and the next writer goes on."""
    command = [sys.executable, "-m", "tests.support.snapshot_killer", str(tmp_path / "snapshots"), "50", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    turns = list(map(int, result.stdout.split()))
    assert len(turns) == 50 and turns == sorted(turns) and turns[-1] > 20
    store = SnapshotStore(tmp_path / "snapshots", GIB)
    listed = {"manifest.json", *store.manifest(A).files}
    assert listed <= set(files(store))
