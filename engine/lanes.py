"""Sessions whose caches are kept in different formats: a step loop for each format, under one budget of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from engine.debugging.idle_audit import audit_when_idle
from engine.errors import EngineStopped
from engine.loader import EngineParts
from engine.step_loop import StepLoop
from engine.tokenizer import ChatTokenizer


class Lanes:
    """The loop of the engine's own format, and one for each other format that a session has asked for.

    They share model, budget, RAM tier and counters, but no block: other bytes mean other K and V. Only the engine
    thread changes anything here; which lane is a session's may be read from any.

    A pool may use what the others' blocks leave of the budget. Extents are whole, so each format may hold up to one
    extent more than that.
    """

    def __init__(self, first: StepLoop) -> None:
        self.first = first
        spec = first.parts.cache.spec
        self._budget = first.parts.max_blocks * spec.block_bytes
        self._loops: dict[str, StepLoop] = {}
        self._formats: dict[str, str] = {}
        self._stuck = False  # every lane waits for another one
        self._adopt(first)

    def __iter__(self) -> Iterator[StepLoop]:
        return iter(list(self._loops.values()))

    @property
    def has_work(self) -> bool:
        return any(loop.has_work for loop in self)

    def find(self, kv_format: str) -> StepLoop | None:
        return self._loops.get(kv_format)

    def format_of(self, session_id: str) -> str | None:
        """None for a session that has had no turn since the start."""
        return self._formats.get(session_id)

    def of(self, session_id: str | None) -> StepLoop:
        return self._loops[self._formats.get(session_id or "", self.first.parts.kv_format)]

    def add(self, parts: EngineParts) -> None:
        """A lane for another format; does nothing if there is one."""
        if parts.kv_format not in self._loops:
            self._adopt(StepLoop(parts, beside=self.first))

    def settle(self, session_id: str, kv_format: str) -> bool:
        """Say in which lane a session is from now on; whether it had a cache in another one, which is dropped."""
        before = self._formats.get(session_id)
        self._formats[session_id] = kv_format
        if before is None or before == kv_format:
            return False
        self._loops[before].release(session_id)
        self._loops[kv_format].keeper.lose(session_id, "kv_format")
        return True

    def forget(self, session_id: str) -> None:
        self.of(session_id).release(session_id)
        self._formats.pop(session_id, None)
        self.first.timeline.forget(session_id)

    def fork(self, session_id: str, new_session_id: str) -> None:
        """The new session is in the same lane."""
        if session_id in self._formats:
            self._formats[new_session_id] = self._formats[session_id]

    def step(self) -> None:
        """One step of each lane that has something to do."""
        for loop in self:
            if loop.has_work or not self.has_work:
                self._share_out(loop)
                loop.step()
        waiting = any(loop.scheduler.waiting for loop in self)
        self._stuck = waiting and not any(loop.scheduler.running for loop in self)

    def use_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        for loop in self:
            loop.use_parts(replace(loop.parts, tokenizer=tokenizer))

    def check_integrity(self) -> None:
        for loop in self:
            loop.check_integrity()

    def save_all(self) -> None:
        for loop in self:
            loop.keeper.save_all()

    def end_all(self, error: EngineStopped | None) -> None:
        for loop in self:
            loop.end_all(error)

    def metrics_report(self) -> dict[str, Any]:
        """As that of a loop; gauges are sums."""
        reports = [loop.metrics_report() for loop in self]
        gauges = reports[0].keys() - self.first.metrics.snapshot().keys() - {"kv_ram_bytes"}
        return {**reports[0], **{name: sum(report[name] for report in reports) for name in gauges}}

    def _adopt(self, loop: StepLoop) -> None:
        self._loops[loop.parts.kv_format] = loop
        loop.scheduler.on_shortage = lambda: self._give_way(loop)
        loop.others_go_on = lambda: (
            not self._stuck and any(other.scheduler.has_work for other in self if other is not loop)
        )
        loop.on_loop = lambda session_id: audit_when_idle(loop, session_id, self.first.jobs, self._has_turns)

    def _has_turns(self) -> bool:
        return any(loop.scheduler.has_work for loop in self)

    def _share_out(self, loop: StepLoop) -> None:
        """Tell a lane's pool how many blocks it may use now; never fewer than it does."""
        if len(self._loops) == 1:
            return
        others = sum(_held_bytes(other) for other in self if other is not loop)
        pool, parts = loop.prefix_cache.pool, loop.parts
        fair = min(parts.max_blocks, (self._budget - others) // parts.cache.spec.block_bytes)
        pool.limit = max(pool.high_water, 2, fair)

    def _give_way(self, loop: StepLoop) -> bool:
        """Have the others' idle sessions leave the pool until this lane's may use more; whether it may."""
        before = loop.prefix_cache.pool.limit
        for other in self:
            while other is not loop and other.give_back():
                self._share_out(loop)
                if loop.prefix_cache.pool.limit > before:
                    return True
        return False


def _held_bytes(loop: StepLoop) -> int:
    return (loop.prefix_cache.pool.high_water - 1) * loop.parts.cache.spec.block_bytes
