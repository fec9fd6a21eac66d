"""What is kept in one KV format: the cache, its schedule and tiers, and what may be done to them between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.debugging.invariants import InvariantLights
from engine.debugging.records import Records
from engine.debugging.timeline import Timeline
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.checkpoints import StateCheckpoints
from engine.kv_cache.compaction import empty_slots
from engine.kv_cache.held import HeldBlocks, SaveJob
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.prefixes import common_prefix_len
from engine.kv_cache.window import BlockPlace
from engine.loader import EngineParts
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.stats import EngineMetrics
from engine.tiers.fingerprint import fingerprint
from engine.tiers.keeper import SessionKeeper
from engine.tiers.restore import Restorer, audit_tolerance


@dataclass(frozen=True, slots=True)
class ExportedBlocks:
    """Blocks out of the pool: `places[row]` is where the block in row `row` of `tensors` (`KVCache.export_blocks`)
    stood."""

    places: tuple[BlockPlace, ...]
    tensors: dict[str, Tensor]


class Lane:
    """Cache, scheduler, runner and keeper of one KV format. Not thread-safe: only the engine thread changes it."""

    def __init__(
        self,
        parts: EngineParts,
        ram_limit: int = 0,
        submit: Callable[[SaveJob], None] | None = None,
        beside: Lane | None = None,
    ) -> None:
        """`beside`: the lane of another KV format, whose RAM, disk and counters this one uses too."""
        self.parts = parts
        self.on_loop: Callable[[str], None] = lambda session_id: None
        """Told the session whose reply has ended and repeats itself."""
        pool, spec = BlockPool(parts.max_blocks), parts.cache.spec
        slots = BlockPool(parts.state_slots) if parts.states is not None else None
        checkpoints = StateCheckpoints(slots) if slots is not None else None
        self.prefix_cache = PrefixCache(pool, spec.block_size, checkpoints, spec.num_layers > 0, spec.groups)
        self.scheduler = Scheduler(self.prefix_cache, parts.limits)
        limits = parts.limits
        self.runner = ModelRunner(
            parts.model, parts.cache, pool, parts.max_seq_len, limits.max_sequences, parts.states, slots
        )
        tolerance = audit_tolerance(parts.kv_format, parts.model)
        self._restorer = Restorer(self.prefix_cache, self.scheduler, self.runner, tolerance)
        self.keeper: SessionKeeper = SessionKeeper(
            self.scheduler,
            self.runner,
            self._restorer,
            ram_limit,
            submit,
            self.fingerprint,
            beside.keeper if beside is not None else None,
        )
        self.metrics: EngineMetrics = beside.metrics if beside is not None else EngineMetrics()
        self.timeline: Timeline = beside.timeline if beside is not None else Timeline()
        self.records = Records()
        self.lights = InvariantLights(self.prefix_cache)
        self._unchecked = False
        """Something has changed since all owners of all blocks were counted last."""

    def fingerprint(self) -> dict[str, str]:
        """Of what runs now. Safe from any thread."""
        return fingerprint(self.parts)

    def use_parts(self, parts: EngineParts) -> None:
        """For turns to come: the same model and cache with another tokenizer."""
        self.parts = parts

    def cached_prefix(self, session_id: str | None, prompt_ids: SequenceOf[int]) -> int:
        """Tokens that a turn with this prompt would reuse; one token is always evaluated."""
        sequence = self.scheduler.find(session_id) if session_id else None
        own = 0
        if sequence is not None:
            common = common_prefix_len(sequence.token_ids[: sequence.cache_pos], prompt_ids)
            own = sequence.resume_point(max(min(common, len(prompt_ids) - 1), 0))
        return max(own, self.prefix_cache.shared(prompt_ids).count)

    def fork(self, session_id: str, new_session_id: str, token_ids: SequenceOf[int]) -> None:
        """Let a new session share what of the session's cache stands for `token_ids`."""
        source = self.scheduler.find(session_id)
        if source is None or self.scheduler.find(new_session_id) is not None:
            return
        usable = source.cache_pos if source.private_from is None else source.private_from
        count = common_prefix_len(source.token_ids[:usable], token_ids)
        self.scheduler.finish(source.fork(new_session_id, count))
        self.keeper.turn_ended(new_session_id)

    def bring_back(self, session_id: str) -> int:
        """Have a session's blocks in the pool if they are kept in RAM; its tokens in the cache then."""
        self.keeper.bring_back(session_id)
        sequence = self.scheduler.find(session_id)
        return sequence.cache_pos if sequence else 0

    def adopt(self, session_id: str, held: HeldBlocks, displacing: bool) -> None:
        """Take a session's blocks that were read from disk. Raises `SnapshotRefused` and `NoRoom`."""
        self._unchecked = True
        began = time.perf_counter()
        self.keeper.adopt(session_id, held, displacing)
        self.timeline.restored(session_id, began)
        sequence = self.scheduler.find(session_id)
        if sequence is not None and self._restorer.compared:
            self.records.spot_audited(sequence, self._restorer.compared, self._restorer.tolerance)
            self._restorer.compared = []

    def adopt_prefix(self, held: HeldBlocks, displacing: bool) -> None:
        """Put blocks that belong to no session into the tree. Raises `SnapshotRefused` and `NoRoom`."""
        self._unchecked = True
        if self.prefix_cache.shared_blocks(held.token_ids[: held.cache_pos]) < held.cache_pos:
            self._restorer.restore(None, held, displacing=displacing, audit=True)

    def export_prefix(self, token_ids: SequenceOf[int]) -> ExportedBlocks | None:
        """The full blocks of these ids that are needed to go on after them; None where the tree lacks one, or there is
        none."""
        cache, size = self.prefix_cache, self.prefix_cache.block_size
        path, count = cache.match(token_ids), len(token_ids) - len(token_ids) % size
        if not count or cache.shared_blocks(token_ids) < count:
            return None
        indices, groups = range(count // size), range(len(cache.windows.groups))
        places = tuple((group, i) for i in indices for group in groups if cache.windows.needs(group, i, count))
        self.runner.sync_blocks()
        return ExportedBlocks(places, self.runner.cache.export_blocks([path[i].block_ids[g] for g, i in places]))

    def forget_prefix(self, token_ids: SequenceOf[int]) -> None:
        """Remove from the tree what of these ids belongs to no session and is not in use."""
        self.prefix_cache.forget(None, within=self.prefix_cache.match(token_ids))
        self._unchecked = True

    def empty_bytes(self) -> int:
        """Bytes of the cache that are allocated and hold no token."""
        cache = self.runner.cache
        slots = empty_slots(self.prefix_cache, self.scheduler.sequences(), cache.capacity_blocks)
        return slots * cache.spec.group_bytes_per_token

    def metrics_report(self) -> dict[str, Any]:
        """Counters since start and gauges of now, for `GET /metrics`."""
        pool = self.prefix_cache.pool
        return {
            **self.metrics.snapshot(),
            "blocks_used": pool.used_count,
            "blocks_free": pool.free_count,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "kv_reserved_bytes": self.runner.cache.reserved_bytes,
            "kv_empty_bytes": self.empty_bytes(),
            "kv_ram_bytes": self.keeper.ram.nbytes,
        }
