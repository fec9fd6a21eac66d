"""Snapshots: each session's blocks and state in files of its own, verified before use, whole at any moment."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engine.kv_cache.durable import sync_folder, write_durably
from engine.kv_cache.held import HeldBlocks, SaveJob
from engine.kv_cache.manifest import Manifest, SnapshotRefused, StoredBlock, StoredState, tensor_kinds
from engine.kv_cache.segments import is_wasteful, read_blocks, read_stacked, read_state, write_segments, write_state
from engine.kv_cache.window import BlockPlace

MANIFEST = "manifest.json"
SESSION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class MissingBlocks(Exception):
    """A job lists blocks that were not brought and are not on disk: an earlier write failed."""


class SnapshotTooLarge(Exception):
    """One session alone would take more than the store's limit."""


class SnapshotStore:
    """Folder with one folder per session. At most `limit` bytes; the least recently used session goes first.

    `names` is what a session id looks like; other folders are left alone.

    A snapshot is a manifest and the segment files it lists. Files are only ever added, and removed once a manifest that
    does without them is in place, so the newest whole snapshot is readable whenever the process ends. Safe from any
    thread. `write` puts a file in place durably.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        write: Callable[[Path, bytes], None] = write_durably,
        names: re.Pattern[str] = SESSION_ID,
    ) -> None:
        self.limit = limit
        self._folder = folder
        self._write = write
        self._names = names
        self._lock = threading.RLock()
        self._sizes: OrderedDict[str, int] | None = None
        self._published: dict[str, int] = {}

    def sizes(self) -> dict[str, int]:
        """Bytes on disk by session, least recently used first. Does not wait for a write."""
        if self._sizes is None:
            with self._lock:
                self._scanned()
        return dict(self._published)

    def manifest(self, session_id: str) -> Manifest | None:
        """None where there is no snapshot. Raises `SnapshotRefused` for a damaged manifest."""
        if not self._names.fullmatch(session_id):
            return None
        try:
            return Manifest.from_bytes((self._folder / session_id / MANIFEST).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotRefused(f"The snapshot can't be read: {error.strerror}.") from error

    def save(self, job: SaveJob) -> None:
        """Write what is new and a manifest of all of it. Does nothing for an id that does not look like one.

        Raises OSError (the old snapshot stays), `MissingBlocks` and `SnapshotTooLarge`.
        """
        if not self._names.fullmatch(job.session_id) or not (job.keys or job.state):
            return
        with self._lock:
            folder, old = self._folder / job.session_id, self._usable(job.session_id)
            fingerprint = job.fingerprint()
            if old is not None and old.fingerprint != fingerprint:
                old = replace(old, blocks=())
            known = {block.key: block for block in old.blocks} if old else {}
            fresh = [key for key in job.keys if key not in known]
            if any(key not in job.new for key in fresh):
                raise MissingBlocks
            brought = [*(job.new[key] for key in fresh), job.state or {}]
            replaced = old.state.nbytes if old is not None and old.state is not None else 0
            self._make_room(job.session_id, sum(t.nbytes for part in brought for t in part.values()) - replaced)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                added, sizes = write_segments(folder, ((key, job.new[key]) for key in fresh), self._write)
                blocks = [known.get(key) or added[key] for key in job.keys]
                state = write_state(folder, job.state, self._write) if job.state else None
                sizes = {**(old.segments if old else {}), **sizes}
                manifest = _manifest_of(job, fingerprint, blocks, sizes, old, state)
                self._put(folder, manifest)
            except OSError:
                self._sweep_leftovers(job.session_id)
                raise
            if is_wasteful(manifest):
                self._rewrite(folder, manifest)

    def load(self, session_id: str, fingerprint: Mapping[str, str]) -> HeldBlocks | None:
        """Read and verify all of a snapshot; None where there is none. Raises `SnapshotRefused`."""
        with self._lock:
            manifest = self.manifest(session_id)
            if manifest is None:
                return None
            manifest.check_fingerprint(fingerprint)
            out = read_stacked(self._folder / session_id, manifest)
            state = read_state(self._folder / session_id, manifest.state) if manifest.state else None
            self._used(session_id)
        return HeldBlocks(
            token_ids=manifest.token_ids,
            cache_pos=manifest.cache_pos,
            places=manifest.places,
            anchors=manifest.anchors,
            turns=tuple(block.turn for block in manifest.blocks),
            keys=tuple(block.key for block in manifest.blocks),
            tensors=out,
            state=state,
        )

    def remove(self, session_id: str) -> None:
        """Delete a session's snapshot, the manifest first. Unknown ids are fine."""
        if not self._names.fullmatch(session_id):
            return
        with self._lock, contextlib.suppress(OSError):
            self._scanned().pop(session_id, None)
            self._publish()
            folder = self._folder / session_id
            (folder / MANIFEST).unlink(missing_ok=True)
            if folder.is_dir():
                self._sweep(folder, None)
                folder.rmdir()
                sync_folder(self._folder)

    def keep_only(self, session_ids: Collection[str]) -> None:
        """Remove the snapshots of all other sessions."""
        for session_id in self.sizes():
            if session_id not in session_ids:
                self.remove(session_id)

    # -- writing ----------------------------------------------------------------------------------------------------

    def _put(self, folder: Path, manifest: Manifest) -> None:
        """The moment at which a snapshot becomes the session's; then what it does not list goes."""
        self._write(folder / MANIFEST, manifest.to_bytes())
        sync_folder(self._folder)
        self._sweep(folder, manifest)
        sizes = self._scanned()
        sizes[manifest.session_id] = _folder_bytes(folder)
        sizes.move_to_end(manifest.session_id)
        self._publish()

    def _rewrite(self, folder: Path, manifest: Manifest) -> None:
        """The same blocks in new files without the dead ones. Where that fails the snapshot stays as it is."""
        try:
            live = ((manifest.blocks[index].key, block) for index, block in read_blocks(folder, manifest))
            added, sizes = write_segments(folder, live, self._write)
            blocks = _placed(
                [added[b.key] for b in manifest.blocks], manifest.places, [b.turn for b in manifest.blocks]
            )
            self._put(folder, replace(manifest, blocks=blocks, segments=sizes))
        except (OSError, SnapshotRefused):
            self._sweep_leftovers(manifest.session_id)

    def _sweep_leftovers(self, session_id: str) -> None:
        """Remove what a write that failed has left, whether it failed before or after its manifest was in place."""
        with contextlib.suppress(SnapshotRefused):
            self._sweep(self._folder / session_id, self.manifest(session_id))

    def _sweep(self, folder: Path, manifest: Manifest | None) -> None:
        """Remove every file of a session that its manifest does not list."""
        listed = {MANIFEST, *manifest.files} if manifest else {MANIFEST}
        with contextlib.suppress(OSError):
            for path in list(folder.iterdir()):
                if path.name not in listed:
                    path.unlink(missing_ok=True)

    def _usable(self, session_id: str) -> Manifest | None:
        try:
            return self.manifest(session_id)
        except SnapshotRefused:
            return None

    # -- the limit --------------------------------------------------------------------------------------------------

    def _make_room(self, session_id: str, more: int) -> None:
        sizes = self._scanned()
        if sizes.get(session_id, 0) + more > self.limit:
            raise SnapshotTooLarge
        for other in [name for name in sizes if name != session_id]:
            if sum(sizes.values()) + more <= self.limit:
                return
            self.remove(other)

    def _used(self, session_id: str) -> None:
        sizes = self._scanned()
        if session_id in sizes:
            sizes.move_to_end(session_id)
            self._publish()
        with contextlib.suppress(OSError):
            os.utime(self._folder / session_id / MANIFEST)

    def _scanned(self) -> OrderedDict[str, int]:
        """Sizes by session, read from the disk at the first call; what a broken-off removal left is removed."""
        if self._sizes is None:
            found: list[tuple[float, str, int]] = []
            self._sizes = OrderedDict()
            for folder in self._folder.iterdir() if self._folder.is_dir() else ():
                if self._names.fullmatch(folder.name):
                    try:
                        used_at = (folder / MANIFEST).stat().st_mtime
                        found.append((used_at, folder.name, _folder_bytes(folder)))
                    except OSError:
                        self.remove(folder.name)
            self._sizes.update((name, size) for _, name, size in sorted(found))
            self._publish()
        return self._sizes

    def _publish(self) -> None:
        self._published = dict(self._sizes or {})


def _manifest_of(
    job: SaveJob,
    fingerprint: Mapping[str, str],
    blocks: Sequence[StoredBlock],
    sizes: Mapping[str, int],
    old: Manifest | None,
    state: StoredState | None,
) -> Manifest:
    first = next(iter(job.new.values()), None)
    return Manifest(
        session_id=job.session_id,
        created_at=time.time(),
        fingerprint=fingerprint,
        block_size=job.block_size,
        token_ids=job.token_ids,
        cache_pos=job.cache_pos,
        tensors=tensor_kinds(first) if first is not None else old.tensors if old else {},
        blocks=_placed(blocks, job.places, job.turns),
        segments={name: sizes[name] for name in sorted({block.segment for block in blocks})},
        anchors=job.anchors,
        state=state,
    )


def _placed(
    blocks: Sequence[StoredBlock], places: Sequence[BlockPlace], turns: Sequence[str | None]
) -> tuple[StoredBlock, ...]:
    return tuple(
        replace(block, group=group, index=index, turn=turn)
        for block, (group, index), turn in zip(blocks, places, turns, strict=True)
    )


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
