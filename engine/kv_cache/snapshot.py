"""Snapshots: each session's blocks in files of its own, verified before use, whole at any moment."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from engine.kv_cache.durable import sync_folder, write_durably
from engine.kv_cache.held import HeldBlocks, SaveJob
from engine.kv_cache.manifest import (
    DTYPES,
    Manifest,
    SnapshotRefused,
    StoredBlock,
    block_digest,
    segment_name,
    segment_number,
    tensor_kinds,
)

MANIFEST = "manifest.json"
SEGMENT_BYTES = 64 * 2**20
"""A segment ends at about this size, so that no more than this is held twice in memory."""
MOST_SEGMENTS = 128
_SESSION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class MissingBlocks(Exception):
    """A job lists blocks that were not brought and are not on disk: an earlier write failed."""


class SnapshotTooLarge(Exception):
    """One session alone would take more than the store's limit."""


class SnapshotStore:
    """Folder with one folder per session. At most `limit` bytes; the least recently used session goes first.

    A snapshot is a manifest and the segment files it lists. Files are only ever added, and removed once a manifest that
    does without them is in place, so the newest whole snapshot is readable whenever the process ends. Safe from any
    thread. `write` puts a file in place durably.
    """

    def __init__(self, folder: Path, limit: int, write: Callable[[Path, bytes], None] = write_durably) -> None:
        self.limit = limit
        self._folder = folder
        self._write = write
        self._lock = threading.RLock()
        self._sizes: OrderedDict[str, int] | None = None

    def sizes(self) -> dict[str, int]:
        """Bytes on disk by session, least recently used first."""
        with self._lock:
            return dict(self._scanned())

    def manifest(self, session_id: str) -> Manifest | None:
        """None where there is no snapshot. Raises `SnapshotRefused` for a damaged manifest."""
        if not _SESSION_ID.fullmatch(session_id):
            return None
        try:
            return Manifest.from_bytes((self._folder / session_id / MANIFEST).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotRefused(f"The snapshot can't be read: {error.strerror}.") from error

    def save(self, job: SaveJob) -> None:
        """Write what is new and a manifest of all of it. Does nothing for an id that is no UUID.

        Raises OSError (the old snapshot stays), `MissingBlocks` and `SnapshotTooLarge`.
        """
        if not _SESSION_ID.fullmatch(job.session_id) or not job.keys:
            return
        with self._lock:
            folder, old = self._folder / job.session_id, self._usable(job.session_id)
            fingerprint = job.fingerprint()
            known = {block.key: block for block in old.blocks} if old and old.fingerprint == fingerprint else {}
            fresh = [key for key in job.keys if key not in known]
            if any(key not in job.new for key in fresh):
                raise MissingBlocks
            self._make_room(job.session_id, sum(t.nbytes for key in fresh for t in job.new[key].values()))
            folder.mkdir(parents=True, exist_ok=True)
            try:
                added, segments = self._write_segments(folder, ((key, job.new[key]) for key in fresh))
                blocks = [known.get(key) or added[key] for key in job.keys]
                kinds = tensor_kinds(job.new[fresh[0]]) if fresh else old.tensors if old else {}
                sizes = {**(old.segments if old else {}), **segments}
                manifest = Manifest(
                    session_id=job.session_id,
                    created_at=time.time(),
                    fingerprint=fingerprint,
                    block_size=job.block_size,
                    token_ids=job.token_ids,
                    cache_pos=job.cache_pos,
                    tensors=kinds,
                    blocks=_with_turns(blocks, job.turns),
                    segments={name: sizes[name] for name in sorted({block.segment for block in blocks})},
                )
                self._put(folder, manifest)
            except OSError:
                self._sweep(folder, old)
                raise
            if _is_wasteful(manifest):
                self._rewrite(folder, manifest)

    def load(self, session_id: str, fingerprint: Mapping[str, str]) -> HeldBlocks | None:
        """Read and verify all of a snapshot; None where there is none. Raises `SnapshotRefused`."""
        with self._lock:
            manifest = self.manifest(session_id)
            if manifest is None:
                return None
            _check_fingerprint(manifest.fingerprint, fingerprint)
            count = len(manifest.blocks)
            out = {
                name: torch.empty((count, *shape), dtype=DTYPES[dtype])
                for name, (dtype, shape) in manifest.tensors.items()
            }
            for index, block in self._blocks(manifest):
                for name, tensor in block.items():
                    out[name][index] = tensor
            self._used(session_id)
        return HeldBlocks(
            token_ids=manifest.token_ids,
            cache_pos=manifest.cache_pos,
            turns=tuple(block.turn for block in manifest.blocks),
            keys=tuple(block.key for block in manifest.blocks),
            tensors=out,
        )

    def remove(self, session_id: str) -> None:
        """Delete a session's snapshot, the manifest first. Unknown ids are fine."""
        if not _SESSION_ID.fullmatch(session_id):
            return
        with self._lock, contextlib.suppress(OSError):
            self._scanned().pop(session_id, None)
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

    def _write_segments(
        self, folder: Path, blocks: Iterator[tuple[str, Mapping[str, Tensor]]]
    ) -> tuple[dict[str, StoredBlock], dict[str, int]]:
        """`(blocks by key, segment sizes)` of new files with these blocks."""
        added: dict[str, StoredBlock] = {}
        sizes: dict[str, int] = {}
        number = max((segment_number(path.name) for path in folder.iterdir()), default=0)
        for group in _grouped(blocks):
            number += 1
            name = segment_name(number)
            stacked = {kind: torch.stack([tensors[kind] for _, tensors in group]) for kind in group[0][1]}
            data = save_tensors(stacked)
            self._write(folder / name, data)
            sizes[name] = len(data)
            for row, (key, tensors) in enumerate(group):
                added[key] = StoredBlock(key, name, row, block_digest(tensors), None)
        return added, sizes

    def _put(self, folder: Path, manifest: Manifest) -> None:
        """The moment at which a snapshot becomes the session's; then what it does not list goes."""
        self._write(folder / MANIFEST, manifest.to_bytes())
        sync_folder(self._folder)
        self._sweep(folder, manifest)
        sizes = self._scanned()
        sizes[manifest.session_id] = _folder_bytes(folder)
        sizes.move_to_end(manifest.session_id)

    def _rewrite(self, folder: Path, manifest: Manifest) -> None:
        """The same blocks in new files without the dead ones. Where that fails the snapshot stays as it is."""
        try:
            live = ((manifest.blocks[index].key, block) for index, block in self._blocks(manifest))
            added, sizes = self._write_segments(folder, live)
            blocks = _with_turns([added[b.key] for b in manifest.blocks], [b.turn for b in manifest.blocks])
            fields = {name: getattr(manifest, name) for name in Manifest.__slots__}
            self._put(folder, Manifest(**{**fields, "blocks": blocks, "segments": sizes}))
        except (OSError, SnapshotRefused):
            self._sweep(folder, manifest)

    def _sweep(self, folder: Path, manifest: Manifest | None) -> None:
        """Remove every file of a session that its manifest does not list."""
        listed = {MANIFEST, *manifest.segments} if manifest else {MANIFEST}
        with contextlib.suppress(OSError):
            for path in list(folder.iterdir()):
                if path.name not in listed:
                    path.unlink(missing_ok=True)

    # -- reading ----------------------------------------------------------------------------------------------------

    def _usable(self, session_id: str) -> Manifest | None:
        try:
            return self.manifest(session_id)
        except SnapshotRefused:
            return None

    def _blocks(self, manifest: Manifest) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """`(index, tensors)` of each block, verified, file by file in the order of the blocks."""
        segment, loaded = "", {}
        for index, block in enumerate(manifest.blocks):
            if block.segment != segment:
                segment, loaded = block.segment, self._segment(manifest, block.segment)
            if block.row >= len(loaded["data"]):
                raise SnapshotRefused(f"The snapshot's file {segment} lacks block {index}.")
            tensors = {name: tensor[block.row] for name, tensor in loaded.items()}
            if block_digest(tensors) != block.digest:
                raise SnapshotRefused(f"The snapshot's block {index} is damaged: its digest does not fit.")
            yield index, tensors

    def _segment(self, manifest: Manifest, name: str) -> dict[str, Tensor]:
        path = self._folder / manifest.session_id / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SnapshotRefused(f"The snapshot's file {name} can't be read: {error.strerror}.") from error
        if len(data) != manifest.segments[name]:
            raise SnapshotRefused(
                f"The snapshot's file {name} has {len(data)} bytes in place of {manifest.segments[name]}."
            )
        try:
            tensors = load_tensors(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise SnapshotRefused(f"The snapshot's file {name} is damaged: its header can't be read.") from error
        found = {kind: (dtype, shape[1:]) for kind, (dtype, shape) in tensor_kinds(tensors).items()}
        if found != dict(manifest.tensors) or len({len(tensor) for tensor in tensors.values()}) != 1:
            raise SnapshotRefused(f"The snapshot's file {name} holds other tensors than its manifest says.")
        return tensors

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
        with contextlib.suppress(OSError):
            os.utime(self._folder / session_id / MANIFEST)

    def _scanned(self) -> OrderedDict[str, int]:
        """Sizes by session, read from the disk at the first call; what a broken-off removal left is removed."""
        if self._sizes is None:
            found: list[tuple[float, str, int]] = []
            self._sizes = OrderedDict()
            for folder in self._folder.iterdir() if self._folder.is_dir() else ():
                if _SESSION_ID.fullmatch(folder.name):
                    try:
                        used_at = (folder / MANIFEST).stat().st_mtime
                        found.append((used_at, folder.name, _folder_bytes(folder)))
                    except OSError:
                        self.remove(folder.name)
            self._sizes.update((name, size) for _, name, size in sorted(found))
        return self._sizes


def _with_turns(blocks: Sequence[StoredBlock], turns: Sequence[str | None]) -> tuple[StoredBlock, ...]:
    return tuple(StoredBlock(b.key, b.segment, b.row, b.digest, turn) for b, turn in zip(blocks, turns, strict=True))


def _grouped(blocks: Iterator[tuple[str, Mapping[str, Tensor]]]) -> Iterator[list[tuple[str, Mapping[str, Tensor]]]]:
    """Lists of at most about `SEGMENT_BYTES`."""
    group: list[tuple[str, Mapping[str, Tensor]]] = []
    size = 0
    for key, tensors in blocks:
        group.append((key, tensors))
        size += sum(tensor.nbytes for tensor in tensors.values())
        if size >= SEGMENT_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _is_wasteful(manifest: Manifest) -> bool:
    """Less than half of the bytes are of blocks that are listed, or there are very many files."""
    block_bytes = 0
    for dtype, shape in manifest.tensors.values():
        block_bytes += torch.Size(shape).numel() * DTYPES[dtype].itemsize
    live = len({(block.segment, block.row) for block in manifest.blocks}) * block_bytes
    header = 1024 * len(manifest.segments)
    return 2 * live + header < sum(manifest.segments.values()) or len(manifest.segments) > MOST_SEGMENTS


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _check_fingerprint(found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    for name in wanted:
        if found.get(name) != wanted[name]:
            raise SnapshotRefused(
                f"The snapshot's {name} is {found.get(name, 'not known')}, and what runs now has {wanted[name]}."
            )
