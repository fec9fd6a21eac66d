"""The numbers of a turn while it runs, and the engine's counters since it started."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any

from engine.debugging.loops import LoopDetector
from engine.debugging.timeline import TurnTrace
from engine.protocol import Miss, TurnStats

TTFT_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class TurnMeter:
    """Collects one turn's counts and moments (seconds of `time.perf_counter`)."""

    session_id: str | None
    prompt_tokens: int
    seed: int
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    reused_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    miss: Miss | None = None
    loops: LoopDetector = field(default_factory=LoopDetector)
    violation: str | None = None
    trace: TurnTrace = field(default_factory=TurnTrace)

    def admit(self, reused_tokens: int) -> None:
        """The first step of this turn is about to run; a preempted turn keeps its first numbers."""
        if self.admitted is None:
            self.admitted = time.perf_counter()
            self.reused_tokens = reused_tokens
            self.computed_tokens = self.prompt_tokens - reused_tokens

    def gap(self, tokens: int = 1) -> float | None:
        """Seconds since the last token, shared among the `tokens` that a step brings; None before the first."""
        return None if self.last_token is None else (time.perf_counter() - self.last_token) / tokens

    def token(self) -> None:
        """Count one sampled token."""
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
        self.generated_tokens += 1

    def stats(self, cache_pos: int, finish_reason: str | None = None) -> TurnStats:
        decode_s = (self.last_token or 0.0) - (self.first_token or 0.0)
        prefill_end = self.first_token or time.perf_counter()
        return TurnStats(
            session_id=self.session_id,
            cache_pos=cache_pos,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            computed_tokens=self.computed_tokens,
            generated_tokens=self.generated_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            ttft_ms=None if self.first_token is None else round(1e3 * (self.first_token - self.submitted), 3),
            prefill_ms=0.0 if self.admitted is None else round(1e3 * (prefill_end - self.admitted), 3),
            decode_tokens_per_s=round((self.generated_tokens - 1) / decode_s, 3) if decode_s > 0 else None,
            finish_reason=finish_reason,
            seed=self.seed,
            loop=self.loops.loop,
            miss=self._priced(),
            violation=self.violation,
        )

    def _priced(self) -> Miss | None:
        """The miss with what it cost, once this turn's own speed is known."""
        if self.miss is None or self.admitted is None or self.first_token is None or not self.computed_tokens:
            return self.miss
        per_token = (self.first_token - self.admitted) / self.computed_tokens
        return replace(self.miss, ms_lost=round(1e3 * per_token * self.miss.tokens_lost, 3))


class Histogram:
    """Counts of seconds per upper bound, as Prometheus wants them (not yet cumulated)."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def snapshot(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total, "count": sum(self.counts)}


class EngineMetrics:
    """Written by the engine thread only."""

    def __init__(self) -> None:
        self.turns: dict[str, int] = {}
        self.tokens = {"reused": 0, "computed": 0, "generated": 0, "drafted": 0, "accepted": 0}
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.per_token = Histogram(TOKEN_BOUNDS_S)

    def turn_ended(self, stats: TurnStats) -> None:
        reason = stats.finish_reason or "error"
        self.turns[reason] = self.turns.get(reason, 0) + 1
        self.tokens["reused"] += stats.reused_tokens
        self.tokens["computed"] += stats.computed_tokens
        self.tokens["generated"] += stats.generated_tokens
        self.tokens["drafted"] += stats.drafted_tokens
        self.tokens["accepted"] += stats.accepted_tokens
        if stats.ttft_ms is not None:
            self.ttft.add(stats.ttft_ms / 1e3)

    def snapshot(self) -> dict[str, Any]:
        return {
            "turns": dict(self.turns),
            "tokens": dict(self.tokens),
            "ttft_seconds": self.ttft.snapshot(),
            "token_seconds": self.per_token.snapshot(),
        }
