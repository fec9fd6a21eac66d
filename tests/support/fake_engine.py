"""An engine without a model: a byte tokenizer, text that depends on prompt and seed alone, counting like a cache's."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from engine.debugging.protocol import (
    DiagnoseQuery,
    FaultRequest,
    MapQuery,
    PrecisionQuery,
    ProbeQuery,
    TokenQuery,
    ValueQuery,
)
from engine.debugging.timeline import TurnTrace
from engine.debugging.tokens import check_query
from engine.debugging.trace_events import trace_events
from engine.errors import (
    Conflict,
    ContextOverflow,
    EngineStopped,
    Forbidden,
    InvalidRequest,
    KVScopeError,
    NotFound,
    Stopped,
)
from engine.jobs import never
from engine.kv_cache.prefixes import common_prefix_len
from engine.prompt import effective_max_tokens
from engine.protocol import Event, Failed, Finished, GenerateRequest, PrefillProgress, TokenDelta, TokenLogprob
from engine.stats import EngineMetrics, TurnMeter
from engine.tiers.frozen_text import check_text, name_of, prefix_ids
from engine.tokenizer.detokenizer import Detokenizer
from tests.support.tiny_tokenizer import chat_tokenizer

BLOCK = 16
HEAD_DIM = 16
WORDS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "world é", "世界")


def reply_text(prompt_ids: Sequence[int], seed: int, words: int = 12) -> str:
    """What the engine answers to a prompt with a seed."""
    digest = hashlib.blake2b(repr((tuple(prompt_ids), seed)).encode(), digest_size=words).digest()
    return " ".join(WORDS[byte % len(WORDS)] for byte in digest)


class FakeEngine:
    """Implements `ChatEngine`. `delay_s` is slept before each token; `fail_with` ends replies after one token."""

    def __init__(self, *, delay_s: float = 0.0, context: int = 2048, name: str = "fake-model") -> None:
        self.tokenizer = chat_tokenizer()
        self.delay_s, self.context, self.name = delay_s, context, name
        self.state = "ok"
        self.fault_injection = False
        self.faults: list[FaultRequest] = []
        self.fail_with: KVScopeError | None = None
        self.caches: dict[str | None, list[int]] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.prefixes: dict[str, dict[str, Any]] = {}
        self.requests: list[GenerateRequest] = []
        self.finished: list[str] = []
        self.diagnosed: list[DiagnoseQuery] = []
        self.holds_audits = False
        """An audit goes on until it is stopped."""
        self.auditing: list[str] = []
        self.counters = EngineMetrics()
        self._busy: set[str] = set()

    def status(self) -> str:
        return self.state

    def generate(self, request: GenerateRequest) -> FakeStream:
        self._check()
        if not request.prompt_ids:
            raise InvalidRequest("The prompt is empty.")
        if len(request.prompt_ids) >= self.context:
            raise ContextOverflow(f"The prompt has {len(request.prompt_ids)} tokens; the context holds {self.context}.")
        if request.session_id in self._busy:
            raise Conflict("This session is still answering.")
        if request.session_id is not None:
            self._busy.add(request.session_id)
        self.requests.append(request)
        return FakeStream(self, request)

    def cached_prefix(self, session_id: str | None, prompt_ids: Sequence[int]) -> int:
        """The longest prefix that any session has in its cache, whole blocks of another one's."""
        own = common_prefix_len(self.caches.get(session_id, ()), prompt_ids)
        shared = max((common_prefix_len(ids, prompt_ids) // BLOCK * BLOCK for ids in self.caches.values()), default=0)
        return max(min(max(own, shared), len(prompt_ids) - 1), 0)

    def release(self, session_id: str) -> None:
        self.caches.pop(session_id, None)
        self.snapshots.pop(session_id, None)

    def fork(self, session_id: str, new_session_id: str, token_ids: Sequence[int]) -> None:
        cached = list(self.caches.get(session_id, ()))
        self.caches[new_session_id] = cached[: common_prefix_len(cached, token_ids)]

    def snapshot(self, session_id: str) -> dict[str, Any]:
        self._check()
        if session_id in self._busy:
            raise Conflict("This session is still answering.")
        if session_id in self.caches:
            tokens = len(self.caches[session_id])
            fingerprint = {"weights": self.name, "KV format": "fp32"}
            self.snapshots[session_id] = {
                "session_id": session_id, "bytes": 100 + tokens, "tokens": tokens, "fingerprint": fingerprint,
                "created_at": time.time(), "age_s": 0.0, "refused": None,
            }  # fmt: skip
        return self.snapshot_info(session_id)

    def snapshot_info(self, session_id: str) -> dict[str, Any]:
        if session_id not in self.snapshots:
            raise NotFound("There is no snapshot of this session.")
        return self.snapshots[session_id]

    def restore(self, session_id: str) -> int:
        self._check()
        return len(self.caches.get(session_id, ()))

    def stored_sessions(self) -> list[str]:
        return list(self.snapshots)

    def freeze(self, text: str, title: str | None = None) -> dict[str, Any]:
        self._check()
        check_text(text)
        name, tokens = name_of(text, title or text), len(prefix_ids(self.tokenizer, text))
        self.prefixes[name] = {"name": name, "tokens": tokens, "bytes": 64 * tokens, "created_at": 1.0, "refused": None}
        return self.prefixes[name]

    def frozen(self) -> list[dict[str, Any]]:
        self._check()
        return list(self.prefixes.values())

    def unfreeze(self, name: str) -> None:
        if self.prefixes.pop(name, None) is None:
            raise NotFound("There is no frozen prefix with this name.")

    def inspect(self, session_id: str) -> dict[str, Any]:
        self._check()
        ids = self.caches.get(session_id, [])
        return {"session_id": session_id, "model": self.name, "cache_pos": len(ids), "token_ids": ids, "blocks": []}

    def probe(self, session_id: str, query: ProbeQuery) -> list[dict[str, Any]]:
        self._check()
        if query.tensor not in ("k", "v"):
            raise InvalidRequest('tensor must be "k" or "v".')
        if query.dims is not None and not 1 <= query.dims <= HEAD_DIM:
            raise InvalidRequest(f"dims must lie between 1 and {HEAD_DIM}, the size of a head.")
        ids = self.caches.get(session_id, [])[query.start : query.start + query.count]
        values = [float("nan"), *[0.5] * (HEAD_DIM - 1)][: query.dims or 10]
        return [
            {"position": query.start + i, "token_id": t, "token": self.tokenizer.token_text(t), "values": values}
            for i, t in enumerate(ids)
        ]

    def cache_map(self, session_id: str, query: MapQuery) -> dict[str, Any]:
        self._need_cached(session_id)
        return {"what": query.what, "head": query.head, "columns": [[0, query.columns]], "values": [[float("nan")]]}

    def cached_values(self, session_id: str, query: ValueQuery) -> dict[str, Any]:
        self._need_cached(session_id)
        return {"layer": query.layer, "position": query.position, "stored": [0.5], "exact": [0.51]}

    def block(self, session_id: str, start: int) -> dict[str, Any]:
        self._need_cached(session_id)
        ids = self.caches[session_id][start : start + BLOCK]
        return {"start": start, "count": len(ids), "text": "".join(map(self.tokenizer.token_text, ids))}

    def _need_cached(self, session_id: str) -> None:
        self._check()
        if not self.caches.get(session_id):
            raise Conflict("Nothing of this chat is in the cache now.", code="not_cached")

    def compare_precision(self, query: PrecisionQuery) -> dict[str, Any]:
        self._check()
        if not query.token_ids:
            raise InvalidRequest("There is nothing in this session to compare yet.")
        return {"kv_format": query.kv_format or "fp16", "tokens": query.count, "of": len(query.token_ids)}

    def token_table(self, query: TokenQuery) -> list[dict[str, Any]]:
        self._check()
        numbers = {"logprob": -0.5, "rank": 1, "entropy": 1.5, "top1": 0.75, "top": []}
        return [{**numbers, **place} for place in self.token_places(query)]

    def token_places(self, query: TokenQuery) -> list[dict[str, Any]]:
        check_query(query)
        first = len(query.prompt_ids) + query.start
        stop = len(query.prompt_ids) + min(query.start + query.count, len(query.reply_ids))
        return [{"block": p // BLOCK, "slot": p % BLOCK, "origin": "decode"} for p in range(first, stop)]

    def diagnose(self, query: DiagnoseQuery, audit: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self._check()
        self.diagnosed.append(query)
        while self.delay_s and not query.cancelled():
            time.sleep(self.delay_s)
        if query.cancelled():
            raise Stopped("The diagnosis was stopped.")
        return {"loop": None, "verdict": "none", "evidence": [], "cure": None, "ms": 1.0}

    def audit(
        self, session_id: str, positions: int | list[int] | None = None, cancelled: Callable[[], bool] = never
    ) -> dict[str, Any]:
        self._check()
        self.auditing.append(session_id)
        while self.holds_audits and not cancelled():
            time.sleep(0.01)
        if cancelled():
            raise Stopped("The audit was stopped.")
        return {
            "verdict": "clean",
            "faults": [],
            "checked_tokens": len(self.caches.get(session_id, [])),
            "of": positions,
        }

    def repair(self, session_id: str, cancelled: Callable[[], bool] = never) -> dict[str, Any]:
        self.audit(session_id, cancelled=cancelled)
        return {"cut_tokens": 0, "recomputed_tokens": 0, "first_position": None, "sentence": "Nothing to repair."}

    def inject(self, request: FaultRequest) -> dict[str, Any]:
        if not self.fault_injection:
            raise Forbidden("The cache may not be damaged on purpose.")
        self.faults.append(request)
        return {"session_id": request.session_id, "kind": request.kind}

    def trace(self, session_id: str) -> dict[str, Any]:
        self._check()
        asked = [request for request in self.requests if request.session_id == session_id]
        turns = [TurnTrace(request.request_id, request.before[-1].end, request.before) for request in asked]
        return trace_events(session_id, turns)

    def memory(self) -> dict[str, Any]:
        self._check()
        return {"weights": 0, "kv_used": sum(map(len, self.caches.values())), "sessions": {}}

    def memory_history(self) -> dict[str, Any]:
        self._check()
        return {"every_s": 5.0, "points": []}

    def metrics(self) -> dict[str, Any]:
        self._check()
        return {
            **self.counters.snapshot(), "blocks_used": 1, "blocks_free": 9, "waiting": 0, "running": 0,
            "kv_reserved_bytes": 1000, "kv_empty_bytes": 250, "kv_ram_bytes": 30, "kv_disk_bytes": 40,
        }  # fmt: skip

    def fingerprint(self, kv_format: str) -> dict[str, str]:
        return {"weights": self.name, "KV format": kv_format}

    def capabilities(self) -> dict[str, Any]:
        self._check()
        size = self.tokenizer.vocab_size
        return {
            "model": self.name,
            "device": "cpu",
            "max_seq_len": self.context,
            "block_size": BLOCK,
            "kv_format": "fp16",
            "kv_formats": ["fp32", "fp16", "int8", "int4"],
            "bytes_per_token": 1024,
            "groups": [{"window": None, "sinks": 0, "layers": 1}],
            "vocab_size": size,
            "warnings": [],
            "snapshots": True,
            "snapshot_limit": 1 << 30,
        }

    def close(self) -> None:
        self.state = "stopped"

    def ended(self, request: GenerateRequest) -> None:
        self._busy.discard(request.session_id or "")
        self.finished.append(request.request_id)

    def _check(self) -> None:
        if self.state != "ok":
            raise EngineStopped("The model is still loading." if self.state == "loading" else "The engine has stopped.")


class FakeStream:
    """The reply is made by the thread that reads it."""

    def __init__(self, engine: FakeEngine, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self._engine, self._request = engine, request
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def __iter__(self) -> Iterator[Event]:
        try:
            yield from self._events()
        finally:
            self._engine.ended(self._request)

    def _events(self) -> Iterator[Event]:
        engine, request, params = self._engine, self._request, self._request.params
        prompt = list(request.prompt_ids)
        vocab_size = engine.tokenizer.vocab_size
        if any(token_id >= vocab_size for token_id in params.logit_bias):
            yield Failed(InvalidRequest("logit_bias names a token that the model does not have."))
            return
        seed = 77 if params.seed is None else params.seed
        meter = TurnMeter(request.session_id, len(prompt), seed)
        meter.admit(engine.cached_prefix(request.session_id, prompt))
        detokenizer = Detokenizer(engine.tokenizer, params.stop)
        limit = effective_max_tokens(len(prompt), engine.context, params.max_tokens)
        reason, cached = "stop", len(prompt)
        yield PrefillProgress(meter.stats(0))
        for token_id in self._token_ids(prompt, seed, limit):
            self._cancelled.wait(engine.delay_s)
            if self._cancelled.is_set():
                reason = "cancelled"
                break
            meter.token()
            engine.caches[request.session_id] = prompt + list(detokenizer._ids)
            cached = len(engine.caches[request.session_id])
            yield TokenDelta((token_id,), detokenizer.push(token_id), self._logprobs(token_id), meter.stats(cached))
            if engine.fail_with is not None:
                yield Failed(engine.fail_with, meter.stats(cached, "error"))
                return
            if detokenizer.stopped is not None:
                break
            if meter.generated_tokens >= limit:
                reason = "length"
        tail = detokenizer.finish()
        stats = meter.stats(cached, reason)
        engine.counters.turn_ended(stats)
        if tail:
            yield TokenDelta((), tail, (), stats)
        yield Finished(detokenizer.text, detokenizer.final_ids(), stats)

    def _token_ids(self, prompt: list[int], seed: int, limit: int) -> list[int]:
        if self._request.forced_ids is not None:
            return list(self._request.forced_ids)
        ids = self._engine.tokenizer.encode(reply_text(prompt, seed))
        return (ids * (limit // len(ids) + 1) if self._request.params.ignore_eos else ids)[:limit]

    def _logprobs(self, token_id: int) -> tuple[TokenLogprob, ...]:
        count = self._request.params.top_logprobs
        if count is None:
            return ()
        text = self._engine.tokenizer.token_text
        top = tuple((token_id + i, text(token_id + i), -0.25 - i) for i in range(count))
        return (TokenLogprob(token_id, text(token_id), -0.25, top),)


def wait_until(condition: Any, timeout_s: float = 5.0) -> bool:
    """Whether the condition came true in time; it may be over again by the time this is told."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())
