"""The engine on this machine, as chats ask for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine import probes
from engine.config import EngineConfig
from engine.debugging.calls import DebuggingCalls, check_ids
from engine.errors import ConfigError, Conflict, ContextOverflow, InvalidRequest, NotFound
from engine.loader import EngineParts, load_parts, parts_in_format, ram_limit
from engine.memory import ledger
from engine.memory.held_arrays import held_ranges
from engine.memory.process import Range
from engine.memory.watch import Holdings, MemoryWatch
from engine.protocol import Failed, GenerateRequest, TimedSpan
from engine.sampling.beam import check_settings
from engine.sampling.params import SamplingParams
from engine.step_loop import StepLoop
from engine.tiers.frozen import FrozenPrefixes
from engine.tiers.frozen_text import check_text, name_of, prefix_ids
from engine.tiers.snapshots import Snapshots
from engine.tokenizer import ChatTokenizer
from engine.turns.turn import QueueStream
from kernels.kv_format import KV_FORMATS

LAST_WRITES_S = 20.0


class LocalEngine(DebuggingCalls):
    """`ChatEngine` on this machine's own device. All cache and schedule changes happen on its thread, between steps."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], EngineParts] = load_parts) -> None:
        super().__init__(config, load)
        self.asked_format: Callable[[str], str | None] = lambda session_id: None
        """What a session's settings say of its KV format, for acts before its first turn since the start."""
        self._opening = threading.Lock()
        self._busy: set[str] = set()
        self._busy_lock = threading.Lock()
        self._snapshots = (
            None
            if config.snapshot_limit == 0
            else Snapshots(config.data_dir / "snapshots", config.snapshot_limit, self._not_saved)
        )
        self._frozen = FrozenPrefixes(config.data_dir / "frozen")
        self._weights: list[Range] | None = None
        self._memory_watch = MemoryWatch(lambda: self._call(self._holdings))

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._need_parts().tokenizer

    def generate(self, request: GenerateRequest) -> QueueStream:
        submitted = time.perf_counter()
        parts = self._need_parts()
        self._check_prompt(request, parts)
        self._claim(request.session_id)
        try:
            lane = self._lane_for(request)
            check_fits(len(request.prompt_ids), lane.parts.max_seq_len)
            brought = self._bring_back(request.session_id, displacing=True)
            if lane is self._steps():
                brought |= self._bring_frozen(request.prompt_ids, displacing=True)
        except BaseException:
            self._unclaim(request.session_id)
            raise
        looked = TimedSpan("restore" if brought else "prepare", submitted, time.perf_counter())
        request = replace(request, before=(*request.before, looked))
        stream = QueueStream(request.request_id, lambda: self._post(lambda: lane.turns.cancel(request.request_id)))
        self._post(lambda: lane.turns.start(request, stream, lambda: self._unclaim(request.session_id), submitted))
        return stream

    def cached_prefix(self, session_id: str | None, prompt_ids: Sequence[int]) -> int:
        self._bring_back(session_id, displacing=False)
        self._bring_frozen(prompt_ids, displacing=False)
        return self._call(lambda: self._steps(session_id).cached_prefix(session_id, prompt_ids))

    def release(self, session_id: str) -> None:
        if self._state == "ok":
            self._call(lambda: self._all().forget(session_id))
        if self._snapshots is not None:
            self._snapshots.remove(session_id)

    def fork(self, session_id: str, new_session_id: str, token_ids: Sequence[int]) -> None:
        self._bring_back(session_id, displacing=False)

        def command() -> None:
            self._all().fork(session_id, new_session_id)
            self._steps(session_id).fork(session_id, new_session_id, token_ids)

        self._call(command)

    def snapshot(self, session_id: str) -> dict[str, Any]:
        snapshots = self._need_snapshots()
        self._need_parts()
        lane = self._lane_of_stored(snapshots, session_id, wanted=True) or self._steps(session_id)
        return snapshots.write_now(session_id, lane, self._call)

    def snapshot_info(self, session_id: str) -> dict[str, Any]:
        info = self._need_snapshots().info(session_id)
        if info is None:
            raise NotFound("There is no snapshot of this session.")
        return info

    def stored_sessions(self) -> list[str]:
        return [] if self._snapshots is None else list(self._snapshots.store.sizes())

    def restore(self, session_id: str) -> int:
        self._bring_back(session_id, displacing=True)
        return self._call(lambda: self._steps(session_id).bring_back(session_id))

    def inspect(self, session_id: str) -> dict[str, Any]:
        self._bring_back(session_id, displacing=False)
        report = self._call(lambda: probes.cache_report(self._steps(session_id), session_id))
        return report if self._snapshots is None else probes.with_disk(report, self._snapshots, session_id)

    def block(self, session_id: str, start: int) -> dict[str, Any]:
        report = self.inspect(session_id)
        token_ids = report["token_ids"] or self._kept_ids(session_id)
        text = self.tokenizer.token_text
        return probes.described_block(report, start, token_ids, lambda ids: "".join(map(text, ids)))

    def _kept_ids(self, session_id: str) -> Sequence[int]:
        """Those of a session that is not in the pool."""
        held = self._call(lambda: self._steps(session_id).keeper.ram.find(session_id))
        kept = held or (None if self._snapshots is None else self._snapshots.manifest(session_id))
        return () if kept is None else kept.token_ids

    def memory(self) -> dict[str, Any]:
        on_disk = {} if self._snapshots is None else self._snapshots.store.sizes()
        report = self._call(lambda: ledger.memory_report(self._all(), on_disk))
        return {**report, "process": self._memory_watch.latest()}

    def memory_history(self) -> dict[str, Any]:
        self._need_parts()
        return self._memory_watch.history()

    def metrics(self) -> dict[str, Any]:
        on_disk = 0 if self._snapshots is None else sum(self._snapshots.store.sizes().values())
        return {**self._call(lambda: self._all().metrics_report()), "kv_disk_bytes": on_disk}

    def use_template(self, name: str) -> None:
        """Render prompts by another chat template from now on; running replies end as they began.

        What is cached of each session is cut where its next prompt differs. Raises `InvalidRequest`.
        """

        def change() -> None:
            self._parts = self._need_parts().with_template(name)
            self._all().use_tokenizer(self._parts.tokenizer)

        self._call(change)
        if self._snapshots is not None:
            self._snapshots.forgive()
        self._frozen.look(self._steps().fingerprint)

    def freeze(self, text: str, title: str | None = None) -> dict[str, Any]:
        parts = self._need_parts()
        check_text(text)
        if parts.states is not None:
            raise InvalidRequest("Nothing can be frozen for this model, because its recurrent state is not stored.")
        ids, size = prefix_ids(parts.tokenizer, text), parts.cache.spec.block_size
        if len(ids) < size:
            raise InvalidRequest(f"The text to freeze is too short: a block of the cache holds {size} tokens.")
        last = list(self.generate(GenerateRequest(ids, SamplingParams(temperature=0, max_tokens=1))))[-1]
        if isinstance(last, Failed):
            raise last.error
        blocks = self._call(lambda: self._steps().export_prefix(ids))
        if blocks is None:
            raise Conflict("The cache was needed for other chats in the meantime; try again.")
        name = name_of(text, text[:80] if title is None else title)
        return self._frozen.save(name, ids, blocks, size, self._steps().fingerprint)

    def frozen(self) -> list[dict[str, Any]]:
        self._need_parts()
        return self._frozen.listing()

    def unfreeze(self, name: str) -> None:
        ids = self._frozen.remove(name)
        if self._state == "ok":
            self._call(lambda: self._steps().forget_prefix(ids))

    def fingerprint(self, kv_format: str) -> dict[str, str]:
        """That of the lane for this format, else of the engine's own."""
        return (self._all().find(kv_format) or self._steps()).fingerprint()

    def capabilities(self) -> dict[str, Any]:
        limit = 0 if self._snapshots is None else self._snapshots.store.limit
        found = self._need_parts().capabilities()
        others = [lane.parts for lane in self._all() if lane is not self._steps()]
        return {
            **found,
            "warnings": [*found["warnings"], *(warning for parts in others for warning in parts.warnings)],
            "snapshots": limit > 0,
            "snapshot_limit": limit,
        }

    def check_integrity(self) -> None:
        """Recount all owners of all blocks. Raises AssertionError naming what is wrong."""
        self._call(self._all().check_integrity)

    def close(self) -> None:
        """End running turns (their streams get what was generated), write snapshots, end the threads. May be called
        again."""
        self._memory_watch.stop()
        if not self._thread.is_alive():
            self._state = "stopped"
        else:
            self._closing = True
            self._mailbox.put(lambda: None)
            self._thread.join(timeout=30)
        if self._snapshots is not None:
            self._snapshots.writer.close()

    # -- on the engine thread ---------------------------------------------------------------------------------------

    def _first_loop(self, parts: EngineParts) -> StepLoop:
        submit = self._snapshots.submit if self._snapshots is not None else None
        return StepLoop(parts, ram_limit(self._config, parts), submit)

    def _before_turns(self) -> None:
        self._frozen.look(self._steps().fingerprint)
        self._mailbox.put(self._memory_watch.start)  # it asks questions, which are answered from then on

    def _before_end(self) -> None:
        """A write that finds earlier ones gone asks for all blocks, which only this thread can bring."""
        if self._snapshots is not None:
            self._all().save_all()
            self._snapshots.writer.flush(LAST_WRITES_S)
            self._drain_mailbox(wait=False)
            self._all().save_all()

    def _holdings(self) -> Holdings:
        """On the engine thread."""
        if self._weights is None:
            self._weights = held_ranges(self._need_parts().model.weights)
        return Holdings.of(self._all(), self._weights)

    # -- KV formats ---------------------------------------------------------------------------------------------------

    def _lane_for(self, request: GenerateRequest) -> StepLoop:
        """The lane that a request wants, made if need be; its session is in it from here on."""
        lanes, kv_format = self._all(), request.params.kv_format or self._need_parts().kv_format
        lane = lanes.find(kv_format) or self._open_lane(kv_format)
        session_id = request.session_id
        if session_id is not None and lanes.format_of(session_id) != kv_format:
            moved = self._call(lambda: lanes.settle(session_id, kv_format))
            if self._snapshots is not None:
                # What was kept in the format before is of no use; what was kept in this one may have been refused.
                (self._snapshots.remove if moved else self._snapshots.forgive)(session_id)
        return lane

    def _open_lane(self, kv_format: str) -> StepLoop:
        lanes, parts = self._all(), self._need_parts()
        if parts.states is not None:
            raise InvalidRequest("A model with recurrent layers keeps all sessions' keys and values in one format.")
        with self._opening:
            if lanes.find(kv_format) is None:
                made = self._run_job(parts_in_format(parts, kv_format))
                self._call(lambda: lanes.add(made))
        lane = lanes.find(kv_format)
        assert lane is not None
        return lane

    def _lane_of_stored(self, snapshots: Snapshots, session_id: str, wanted: bool) -> StepLoop | None:
        """The lane of a session, else the one that its snapshot fits. If nobody has asked for that format yet and the
        session is `wanted` now, that lane is made if it is what the session asks for, else it is the engine's own.
        If it is not wanted, None: its next turn will say."""
        lanes = self._all()
        stored = None if lanes.format_of(session_id) else snapshots.kv_format(session_id)
        if stored is None or stored not in KV_FORMATS:
            return lanes.of(session_id)
        lane = lanes.find(stored)
        if lane is None and wanted and self.asked_format(session_id) == stored:
            # Where it can't be made, the engine's own will refuse the snapshot, naming what differs.
            with suppress(ConfigError, InvalidRequest):
                lane = self._open_lane(stored)
        if lane is not None:
            self._call(lambda: lanes.settle(session_id, stored))
        return lane or (lanes.first if wanted else None)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def _bring_back(self, session_id: str | None, displacing: bool) -> bool:
        """Have a session that is only on disk in the pool before what is posted next; whether there was one."""
        if self._snapshots is not None and session_id is not None and self._state == "ok":
            lane = self._lane_of_stored(self._snapshots, session_id, displacing)
            if lane is not None:
                return self._snapshots.bring_back(session_id, displacing, lane, self._post)
        return False

    def _bring_frozen(self, prompt_ids: Sequence[int], displacing: bool) -> bool:
        """Have what is frozen of this prompt in the tree before what is posted next; whether there was something."""
        if self._state != "ok":
            return False
        return self._frozen.bring_back(prompt_ids, displacing, self._steps(), self._call, self._post)

    def _not_saved(self, session_id: str, again: bool) -> None:
        """On the writer's thread."""
        writer = self._need_snapshots().writer

        def tell() -> None:
            if not self._steps(session_id).keeper.not_saved(session_id, again):
                writer.give_up(session_id)

        self._mailbox.put(tell)

    def _need_snapshots(self) -> Snapshots:
        if self._snapshots is None:
            raise InvalidRequest("No snapshots are kept: KVScope was started with --snapshot-limit 0.")
        return self._snapshots

    def _check_prompt(self, request: GenerateRequest, parts: EngineParts) -> None:
        if not request.prompt_ids:
            raise InvalidRequest("The prompt is empty.")
        check_fits(len(request.prompt_ids), parts.max_seq_len)
        check_ids(request.prompt_ids, parts)
        check_settings(request.beams, request.params)

    def _claim(self, session_id: str | None) -> None:
        if session_id is None:
            return
        with self._busy_lock:
            if session_id in self._busy:
                raise Conflict("This session is still answering; wait for the reply or stop it first.")
            self._busy.add(session_id)

    def _unclaim(self, session_id: str | None) -> None:
        with self._busy_lock:
            self._busy.discard(session_id or "")


def check_fits(count: int, limit: int) -> None:
    """Raises `ContextOverflow` if a prompt of so many tokens leaves no room for a reply."""
    if count >= limit:
        raise ContextOverflow(f"The prompt has {count} tokens, but the context holds {limit} with the reply.")
