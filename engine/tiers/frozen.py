"""Frozen prefixes: beginnings of prompts that were computed ahead, on disk, and in the tree once a prompt wants one."""

from __future__ import annotations

import logging
import re
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import NotFound, StorageFailed
from engine.kv_cache.held import HeldBlocks, SaveJob
from engine.kv_cache.manifest import Manifest, SnapshotRefused
from engine.kv_cache.prefixes import common_prefix_len
from engine.kv_cache.snapshot import SnapshotStore
from engine.lane import ExportedBlocks, Lane
from engine.tiers.restore import NoRoom, audit_blocks

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}-[0-9a-f]{8}")
WORTH_LOADING = 0.5
"""A prompt that shares less than this share of a prefix is computed: what is loaded for it would be for others."""
log = logging.getLogger("kvscope.frozen")


class FrozenPrefixes:
    """Folder with one snapshot per name. What each holds is known in memory; blocks are read when they are wanted.

    Nothing is evicted: a prefix stays on disk until it is removed by name. Safe from any thread.
    """

    def __init__(self, folder: Path) -> None:
        self.store = SnapshotStore(folder, sys.maxsize, names=NAME)
        self._known: dict[str, Manifest | None] = {}
        self._refused: dict[str, str] = {}
        self._lock = threading.Lock()

    def look(self, fingerprint: Callable[[], Mapping[str, str]]) -> None:
        """Take note of what is on disk; one line in the log for each that does not fit what runs now."""
        for name in self.store.sizes():
            try:
                manifest = self.store.manifest(name)
                self._learn(name, manifest)
                if manifest is not None:
                    manifest.check_fingerprint(fingerprint())
            except SnapshotRefused as error:
                self._refuse(name, str(error))

    def save(
        self,
        name: str,
        token_ids: Sequence[int],
        blocks: ExportedBlocks,
        block_size: int,
        fingerprint: Callable[[], Mapping[str, str]],
    ) -> dict[str, Any]:
        """Write full blocks, which hold the first of `token_ids`, in place of what the name had; the entry of
        `listing`. Raises `StorageFailed`."""
        keys = [uuid.uuid4().hex for _ in blocks.places]
        job = SaveJob(
            session_id=name,
            fingerprint=fingerprint,
            block_size=block_size,
            token_ids=tuple(token_ids),
            cache_pos=len(token_ids) // block_size * block_size,
            places=blocks.places,
            turns=(None,) * len(keys),
            keys=tuple(keys),
            new={key: {kind: tensor[row] for kind, tensor in blocks.tensors.items()} for row, key in enumerate(keys)},
        )
        try:
            self.store.save(job)
        except OSError as error:
            raise StorageFailed(f"The frozen prefix could not be written to disk: {error.strerror}.") from error
        self._learn(name, self.store.manifest(name))
        return self._entry(name)

    def remove(self, name: str) -> tuple[int, ...]:
        """Delete one; the ids whose blocks it held. Raises `NotFound`."""
        if name not in self.store.sizes():
            raise NotFound("There is no frozen prefix with this name.")
        self.store.remove(name)
        with self._lock:
            manifest = self._known.pop(name, None)
            self._refused.pop(name, None)
        return manifest.token_ids[: manifest.cache_pos] if manifest is not None else ()

    def listing(self) -> list[dict[str, Any]]:
        """`{name, tokens, bytes, created_at, refused}` of each, by name."""
        return [self._entry(name) for name in sorted(self.store.sizes())]

    def bring_back(
        self,
        prompt_ids: Sequence[int],
        displacing: bool,
        loop: Lane,
        call: Callable[[Callable[[], bool]], bool],
        post: Callable[[Callable[[], None]], None],
    ) -> bool:
        """Read and verify what this prompt begins with, if the tree lacks it, and have the engine thread take it over;
        whether it does.

        `call` and `post` run a function there. Without `displacing` only into blocks that are free.
        """
        found = self._match(prompt_ids)
        try:
            if found is None or not call(lambda: _is_wanted(*found, prompt_ids, displacing, loop)):
                return False
        except TimeoutError:
            return False
        name = found[0].session_id
        try:
            held = self.store.load(name, loop.fingerprint())
        except SnapshotRefused as error:
            self._refuse(name, str(error))
            return False
        if held is not None:
            post(lambda: self._adopt(name, held, displacing, loop))
        return held is not None

    def _match(self, prompt_ids: Sequence[int]) -> tuple[Manifest, int] | None:
        """The usable prefix that shares most with a prompt, and how many tokens."""
        with self._lock:
            usable = [m for name, m in self._known.items() if m is not None and name not in self._refused]
        shared = [(m, common_prefix_len(m.token_ids[: m.cache_pos], prompt_ids)) for m in usable]
        worth = [found for found in shared if found[1] >= WORTH_LOADING * found[0].cache_pos]
        return max(worth, key=lambda found: found[1], default=None)

    def _adopt(self, name: str, held: HeldBlocks, displacing: bool, loop: Lane) -> None:
        """On the engine thread. Where there is no room the prompt is computed."""
        try:
            loop.adopt_prefix(held, displacing)
        except SnapshotRefused as error:
            self._refuse(name, str(error))
        except NoRoom:
            return

    def _learn(self, name: str, manifest: Manifest | None) -> None:
        with self._lock:
            self._known[name] = manifest
            self._refused.pop(name, None)

    def _refuse(self, name: str, sentence: str) -> None:
        with self._lock:
            told = self._refused.get(name) == sentence
            self._refused[name] = sentence
        if not told:
            log.warning("The frozen prefix %s is not used. %s", name, sentence)

    def _entry(self, name: str) -> dict[str, Any]:
        with self._lock:
            manifest, refused = self._known.get(name), self._refused.get(name)
        return {
            "name": name,
            "tokens": manifest.cache_pos if manifest is not None else 0,
            "bytes": self.store.sizes().get(name, 0),
            "created_at": manifest.created_at if manifest is not None else None,
            "refused": refused,
        }


def _is_wanted(manifest: Manifest, shared: int, prompt_ids: Sequence[int], displacing: bool, loop: Lane) -> bool:
    """On the engine thread: whether the first `shared` tokens could be taken over from further on than the tree allows
    now, and there is room for all of it."""
    cache, places = loop.prefix_cache, set(manifest.places)
    shared -= shared % manifest.block_size
    reach = cache.windows.resume_point(shared, lambda group, index: (group, index) in places)
    if cache.shared_blocks(prompt_ids[:shared]) >= reach:
        return False
    return displacing or len(manifest.blocks) + audit_blocks(cache.windows) <= cache.pool.free_count
