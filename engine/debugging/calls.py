"""The engine's debugging view, as callers on other threads ask for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine import probes
from engine.debugging import diagnosis, maps, precision, tokens, values
from engine.debugging.audit import audit
from engine.debugging.inject import inject
from engine.debugging.protocol import (
    DiagnoseQuery,
    FaultRequest,
    MapQuery,
    PrecisionQuery,
    ProbeQuery,
    TokenQuery,
    ValueQuery,
)
from engine.debugging.quarantine import repair_cut
from engine.debugging.trace_events import trace_events
from engine.engine_thread import EngineThread
from engine.errors import ContextOverflow, Forbidden, InvalidRequest
from engine.jobs import cancellable, never
from engine.loader import EngineParts
from engine.protocol import Failed, Finished, GenerateRequest
from engine.sampling.params import SamplingParams
from engine.turns.turn import QueueStream


class DebuggingCalls(EngineThread, ABC):
    """What a person asks to find out why a model says what it says."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> QueueStream: ...

    @abstractmethod
    def restore(self, session_id: str) -> int: ...

    @abstractmethod
    def inspect(self, session_id: str) -> dict[str, Any]: ...

    def probe(self, session_id: str, query: ProbeQuery) -> list[dict[str, Any]]:
        return self._call(lambda: probes.probe(self._steps(session_id), session_id, query))

    def cache_map(self, session_id: str, query: MapQuery) -> dict[str, Any]:
        maps.check_query(query, self._need_parts().cache.spec)
        lane = self._steps(session_id)
        return self._run_job(maps.cache_map(lane, lane.parts, session_id, query))

    def cached_values(self, session_id: str, query: ValueQuery) -> dict[str, Any]:
        values.check_query(query, self._need_parts().cache.spec)
        lane = self._steps(session_id)
        return self._run_job(values.stored_and_exact(lane, lane.parts, session_id, query))

    def compare_precision(self, query: PrecisionQuery) -> dict[str, Any]:
        parts = self._need_parts()
        precision.check_query(query)
        if len(query.token_ids) > parts.max_seq_len:
            raise ContextOverflow(
                f"The session has {len(query.token_ids)} tokens, but the context holds {parts.max_seq_len}."
            )
        check_ids(query.token_ids, parts)
        return self._run_job(precision.compare_precision(parts, query))

    def token_table(self, query: TokenQuery) -> list[dict[str, Any]]:
        self._need_parts()
        lane = self._steps(query.session_id)
        tokens.check_query(query)
        _check_history(query, lane.parts)
        rows = self._run_job(tokens.token_rows(lane, lane.parts, query))
        return [{**row, **place} for row, place in zip(rows, self.token_places(query), strict=True)]

    def token_places(self, query: TokenQuery) -> list[dict[str, Any]]:
        tokens.check_query(query)
        return self._call(lambda: tokens.places(self._steps(query.session_id), query))

    def diagnose(self, query: DiagnoseQuery, audit: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self._need_parts()
        parts = self._steps(query.session_id).parts
        diagnosis.check_query(query)
        _check_history(query, parts)
        return self._run_job(cancellable(diagnosis.diagnose(parts, query, audit), query.cancelled, "diagnosis"))

    def audit(
        self, session_id: str, positions: int | list[int] | None = None, cancelled: Callable[[], bool] = never
    ) -> dict[str, Any]:
        self.restore(session_id)
        lane = self._steps(session_id)
        return self._run_job(cancellable(audit(lane, lane.parts, session_id, positions), cancelled, "audit"))

    def repair(self, session_id: str, cancelled: Callable[[], bool] = never) -> dict[str, Any]:
        found = self.audit(session_id, cancelled=cancelled)
        cut = self._call(lambda: repair_cut(self._steps(session_id), session_id, found))
        if cut.prompt_ids:
            kv_format = self._all().format_of(session_id)
            params = SamplingParams(temperature=0, max_tokens=1, kv_format=kv_format)
            request = GenerateRequest(cut.prompt_ids, params, session_id, forced_ids=cut.forced_ids)
            last = list(self.generate(request))[-1]
            if isinstance(last, Failed):
                raise last.error
            assert isinstance(last, Finished)
            # What the tree holds of other sessions' clean blocks need not be run.
            cut.report["recomputed_tokens"] = last.stats.computed_tokens
        return {**cut.report, "cache_pos": self.inspect(session_id)["cache_pos"]}

    def inject(self, request: FaultRequest) -> dict[str, Any]:
        if not self._config.fault_injection:
            raise Forbidden(
                "The cache may not be damaged on purpose unless KVScope is started with --allow-fault-injection."
            )
        self.restore(request.session_id)
        lane = self._steps(request.session_id)
        return self._run_job(inject(lane, lane.parts, request))

    def trace(self, session_id: str) -> dict[str, Any]:
        on_card = self._need_parts().model.device.type == "cuda"
        turns = self._call(lambda: self._steps().timeline.turns(session_id))
        return trace_events(session_id, turns, on_card)


def _check_history(query: TokenQuery | DiagnoseQuery, parts: EngineParts) -> None:
    ids = (*query.prompt_ids, *query.reply_ids)
    if len(ids) > parts.max_seq_len:
        raise ContextOverflow(f"The reply ends at token {len(ids)}, but the context holds {parts.max_seq_len}.")
    check_ids(ids, parts)


def check_ids(token_ids: Sequence[int], parts: EngineParts) -> None:
    """Raises `InvalidRequest` if an id is not the model's."""
    if min(token_ids) < 0 or max(token_ids) >= parts.vocab_size:
        raise InvalidRequest(f"Token ids must lie between 0 and {parts.vocab_size - 1}.")
