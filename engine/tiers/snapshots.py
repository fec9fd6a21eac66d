"""Snapshots as callers' threads use them: read and verified here, before the engine thread hears of them."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import NotFound, StorageFailed
from engine.kv_cache.held import HeldBlocks, SaveJob
from engine.kv_cache.manifest import Manifest, SnapshotRefused
from engine.kv_cache.snapshot import SnapshotStore
from engine.kv_cache.snapshot_writer import SnapshotWriter
from engine.lane import Lane
from engine.tiers.restore import NoRoom, audit_blocks

MOST_BYTES = 8 * 2**30
DISK_SHARE = 0.25
WAIT_S = 60.0
log = logging.getLogger("kvscope.snapshots")


class Snapshots:
    """Store and writer of all sessions' snapshots, and which of them were refused. Safe from any thread."""

    def __init__(self, folder: Path, limit: int | None, on_failed: Callable[[str, bool], None]) -> None:
        """`limit` in bytes; None is a quarter of what the disk has for them, at most `MOST_BYTES`."""
        self.store = SnapshotStore(folder, limit or 0)
        if limit is None:
            self.store.limit = default_limit(folder, sum(self.store.sizes().values()))
        self.writer = SnapshotWriter(self.store, on_failed)
        self._refused: dict[str, str] = {}
        self._lock = threading.Lock()

    def submit(self, job: SaveJob) -> None:
        """Have a session's blocks written; what was wrong with the ones before no longer counts."""
        self.writer.submit(job)
        self.forgive(job.session_id)

    def bring_back(
        self, session_id: str, displacing: bool, loop: Lane, post: Callable[[Callable[[], None]], None]
    ) -> bool:
        """Read and verify a session that is only on disk, and have the engine thread take it over; whether it does.

        Without `displacing` only into blocks that are free.
        """
        if session_id in loop.keeper.present or not (displacing or self._fits(session_id, loop)):
            return False
        try:
            held = self.load(session_id, loop.fingerprint())
        except SnapshotRefused as error:
            sentence = str(error)
            post(lambda: loop.keeper.lose(session_id, "snapshot", sentence))
            return False
        if held is not None:
            post(lambda: self._adopt(session_id, held, displacing, loop))
        return held is not None

    def _fits(self, session_id: str, loop: Lane) -> bool:
        try:
            manifest = self.store.manifest(session_id)
        except SnapshotRefused:
            return True  # reading it will say so
        if manifest is None:
            return False
        checkpoints = loop.prefix_cache.checkpoints
        wanted = len(manifest.blocks) + audit_blocks(loop.prefix_cache.windows) if manifest.blocks else 0
        has_slot = checkpoints is None or checkpoints.slots.free_count > 0
        return has_slot and wanted <= loop.prefix_cache.pool.free_count

    def _adopt(self, session_id: str, held: HeldBlocks, displacing: bool, loop: Lane) -> None:
        """On the engine thread."""
        try:
            loop.adopt(session_id, held, displacing)
        except SnapshotRefused as error:
            loop.keeper.lose(session_id, "snapshot", str(error))
            self.refuse(session_id, str(error))
        except NoRoom:
            loop.keeper.lose(session_id, "evicted")

    def write_now(self, session_id: str, loop: Lane, call: Callable[[Callable[[], object]], object]) -> dict[str, Any]:
        """Have what is in the pool written; `info` of it. `call` runs a function on the engine thread.

        Raises `StorageFailed`, `Conflict` while the session is answering, `NotFound` where it has nothing.
        """
        for _ in range(2):
            call(lambda: loop.keeper.save_now(session_id))
            try:
                failure = self.writer.wait(session_id, WAIT_S)
            except TimeoutError:
                failure = f"The cache could not be written to disk within {WAIT_S:.0f} s."
            if failure is not None:
                raise StorageFailed(failure)
            info = self.info(session_id)
            if info is not None and info["fingerprint"] == loop.fingerprint():
                return info
            # Another session's needed the room on disk in the meantime, or it was written before a change of template.
            call(lambda: loop.keeper.not_saved(session_id, True))
        raise NotFound("Nothing of this session is in the cache.")

    def load(self, session_id: str, fingerprint: Mapping[str, str]) -> HeldBlocks | None:
        """The newest state of a session, verified; None where there is none. Raises `SnapshotRefused`, each time."""
        known = self.refusal(session_id)
        if known is not None:
            raise SnapshotRefused(known)
        try:
            self.writer.wait(session_id, WAIT_S)
            return self.store.load(session_id, fingerprint)
        except TimeoutError:
            return None
        except SnapshotRefused as error:
            self.refuse(session_id, str(error))
            raise

    def refuse(self, session_id: str, sentence: str) -> None:
        """Do not read this session's snapshot again; told in the log and on the page."""
        log.warning("Session %s is computed again. %s", session_id, sentence)
        with self._lock:
            self._refused[session_id] = sentence

    def refusal(self, session_id: str) -> str | None:
        """Why the snapshot that is on disk now can't be used, if that is known."""
        with self._lock:
            return self._refused.get(session_id)

    def forgive(self, session_id: str | None = None) -> None:
        """Read again when asked next: another snapshot has been written, or (None) something else runs now."""
        with self._lock:
            if session_id is None:
                self._refused.clear()
            else:
                self._refused.pop(session_id, None)

    def manifest(self, session_id: str) -> Manifest | None:
        """None also where it is damaged."""
        try:
            return self.store.manifest(session_id)
        except SnapshotRefused:
            return None

    def kv_format(self, session_id: str) -> str | None:
        """The name of the KV format that a session is kept in; None where nothing readable is."""
        manifest = self.manifest(session_id)
        return None if manifest is None else manifest.fingerprint.get("KV format", "").partition(",")[0]

    def info(self, session_id: str) -> dict[str, Any] | None:
        """What is on disk of a session: the body of `GET /api/sessions/{id}/snapshot`."""
        manifest = self.manifest(session_id)
        if manifest is None:
            return None
        return {
            "session_id": session_id,
            "bytes": self.store.sizes().get(session_id, 0),
            "tokens": manifest.cache_pos,
            "blocks": len(manifest.blocks),
            "files": len(manifest.files) + 1,
            "fingerprint": dict(manifest.fingerprint),
            "created_at": manifest.created_at,
            "age_s": round(max(time.time() - manifest.created_at, 0.0), 3),
            "refused": self.refusal(session_id),
        }

    def remove(self, session_id: str) -> None:
        """The session is gone."""
        self.writer.remove(session_id)
        self.forgive(session_id)


def default_limit(folder: Path, used: int) -> int:
    """A share of what is free on the disk together with the `used` bytes of snapshots that lie there already."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return min(int((shutil.disk_usage(existing).free + used) * DISK_SHARE), MOST_BYTES)
