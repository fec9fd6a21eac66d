"""A conversation service whose engine speaks words from a list at a set rate: real store, real turns, no model."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from engine.debugging.protocol import ProbeQuery
from engine.errors import EngineStopped
from engine.kv_cache.prefixes import common_prefix_len
from engine.protocol import (
    ChatMessage,
    Event,
    Finished,
    GenerateRequest,
    Loop,
    Miss,
    PrefillProgress,
    Prompt,
    Span,
    TokenDelta,
    TurnStats,
)
from sessions.store import SessionStore
from ui.chat import ChatService

REPLY = (
    "The **KV cache** keeps one key and one value vector per layer for every token, so that a new message"
    " costs only its own.\n\n"
    "- `cache_pos` says how far it is filled\n- blocks hold 16 tokens each\n\n"
    "```python\ndef append(cache, k, v, pos):\n    cache.keys[pos] = k  # in place\n    return pos + 1\n```\n\n"
    "With $L$ layers the price is $$2 \\cdot L \\cdot h \\cdot d \\cdot b$$ bytes per token.\n\n"
)
BLOCK = 16


class FakeTokenizer:
    """One id per space-separated piece, learned as pieces come by."""

    template_name = "fake"

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def encode(self, text: str) -> list[int]:
        return [self._id(piece) for piece in pieces(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._pieces[item] for item in ids)

    def token_text(self, token_id: int) -> str:
        return self._pieces[token_id]

    def render(
        self,
        messages: Sequence[ChatMessage],
        date: datetime,
        add_generation_prompt: bool = True,
        *,
        continue_last: bool = False,
    ) -> Prompt:
        ids: list[int] = []
        spans: list[Span] = []
        for index, message in enumerate(messages):
            start = len(ids)
            ids += self.encode(f"<{message.role}> ")
            ids += message.token_ids or self.encode(message.content)
            ids += self.encode("<end> ")
            spans.append(Span(index, start, len(ids)))
        return Prompt(tuple(ids + (self.encode("<assistant> ") if add_generation_prompt else [])), tuple(spans))

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


def pieces(text: str) -> list[str]:
    """The text cut after every blank."""
    return [piece for piece in text.replace(" ", " \0").split("\0") if piece]


class FakeStream:
    def __init__(self, engine: FakeEngine, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self._engine, self._request = engine, request
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def __iter__(self) -> Iterator[Event]:
        engine, request = self._engine, self._request
        prompt = list(request.prompt_ids)
        old = engine.caches.get(request.session_id or "", [])
        reused = _reusable(old, prompt)
        miss = None
        if reused < len(old):
            wanted = prompt[reused] if reused < len(prompt) else None
            miss = Miss(reused, request.cause or "template", old[reused], wanted, len(old) - reused)
        started = time.perf_counter()
        first: float | None = None
        words = pieces(engine.reply) if request.params.max_tokens is None else pieces(engine.reply * 50)
        words = words[: request.params.max_tokens]
        ids: list[int] = []
        reason: str | None = None

        def stats() -> TurnStats:
            took = time.perf_counter() - (first or started)
            return TurnStats(
                request.session_id, len(prompt) + max(len(ids) - 1, 0), len(prompt), reused, len(prompt) - reused,
                len(ids), first and 1e3 * (first - started), 12.0, len(ids) / took if len(ids) > 1 else None,
                reason, request.params.seed, miss, engine.loop,
            )  # fmt: skip

        yield PrefillProgress(stats())
        for number, word in enumerate(words):
            if number == engine.pause_at:
                engine.go_on.wait(30)
            self._cancelled.wait(max(0.0, started + (number + 1) / engine.rate - time.perf_counter()))
            if self._cancelled.is_set():
                reason = "cancelled"
                break
            first = first or time.perf_counter()
            ids += engine.tokenizer.encode(word)
            engine.caches[request.session_id or ""] = prompt + ids[:-1]
            yield TokenDelta((ids[-1],), word, (), stats())
        reason = reason or ("length" if request.params.max_tokens else "stop")
        yield Finished("".join(words[: len(ids)]), tuple(ids), stats())


class FakeEngine:
    """What the conversation service and the page need of an engine."""

    def __init__(self, rate: float = 100.0, reply: str = REPLY, max_seq_len: int = 2048) -> None:
        self.rate, self.reply, self.max_seq_len = rate, reply, max_seq_len
        self.pause_at: int | None = None
        self.go_on = threading.Event()
        self.loop: Loop | None = None
        self.tokenizer = FakeTokenizer()
        self.caches: dict[str, list[int]] = {}
        self.warnings: list[str] = []
        self.away: dict[str, Any] | None = None
        self.refused: str | None = None
        self.state = "ok"

    def status(self) -> str:
        return self.state

    def generate(self, request: GenerateRequest) -> FakeStream:
        self._need_ok()
        return FakeStream(self, request)

    def cached_prefix(self, session_id: str | None, prompt_ids: Sequence[int]) -> int:
        self._need_ok()
        return _reusable(self.caches.get(session_id or "", []), list(prompt_ids))

    def release(self, session_id: str) -> None:
        self.caches.pop(session_id, None)

    def fork(self, session_id: str, new_session_id: str, token_ids: Sequence[int]) -> None:
        cached = self.caches.get(session_id, [])
        self.caches[new_session_id] = cached[: _reusable(cached, list(token_ids))]

    def stored_sessions(self) -> list[str]:
        return []

    def inspect(self, session_id: str) -> dict[str, Any]:
        self._need_ok()
        count = len(self.caches.get(session_id, []))
        blocks = [
            {"id": 40 + index, "start": index * BLOCK, "count": min(BLOCK, count - index * BLOCK),
             "ref_count": 2 if index < 3 else 1, "tier": "ram", "format": "fp16", "written_by_turn": None,
             "last_audit": None}
            for index in range(math.ceil(count / BLOCK))
        ]  # fmt: skip
        return {
            "session_id": session_id, "model": "fake-135M", "kv_format": "fp16", "cache_pos": count,
            "max_seq_len": self.max_seq_len, "status": "idle", "token_ids": self.caches.get(session_id, []),
            "block_size": BLOCK, "block_table": [block["id"] for block in blocks], "blocks": blocks,
            "bytes_per_token": 23040, "bytes_used": count * 23040, "bytes_reserved": len(blocks) * BLOCK * 23040,
            "kv_ratio": 2.5 if count else None,
            "away": self.away, "refused": self.refused,
            "invariants": {"cache_pos_within_blocks": True, "no_position_twice": True},
            "violation": None, "audit": None,
        }  # fmt: skip

    def probe(self, session_id: str, query: ProbeQuery) -> list[dict[str, Any]]:
        self._need_ok()
        ids = self.caches.get(session_id, [])
        rows = []
        for position in range(query.start, min(query.start + query.count, len(ids))):
            phase = position * 0.7 + query.layer + 3 * query.head + (query.tensor == "v")
            values = [round(2 * math.sin(phase + 1.3 * dim), 6) for dim in range(query.dims or 10)]
            token_id = ids[position]
            rows.append(
                {
                    "position": position,
                    "token_id": token_id,
                    "token": self.tokenizer.token_text(token_id),
                    "values": values,
                    "norm": 8.0 + math.sin(phase),
                }
            )
        return rows

    def memory(self) -> dict[str, Any]:
        self._need_ok()
        used = sum(len(ids) for ids in self.caches.values()) * 23040
        return {
            "weights": 141 << 20, "kv_used": used, "kv_reserved": max(used, 32 << 20), "kv_ram": 32 << 20,
            "kv_disk": 5 << 20, "kv_empty": 3 << 20, "fragmentation": 0.1,
            "workspace": 4 << 20, "allocator_slack": 210 << 20, "other_processes": 3 << 30, "total_device": 16 << 30,
            "free_device": 11 << 30, "process_rss": 412 << 20, "ram_total": 16 << 30, "ram_available": 11 << 30,
            "blocks_used": 9, "blocks_free": 200, "block_bytes": 368640, "sessions": {},
        }  # fmt: skip

    def metrics(self) -> dict[str, Any]:
        return {"turns": {}, "tokens": {"reused": 0, "computed": 0, "generated": 0}}

    def fingerprint(self, kv_format: str) -> dict[str, str]:
        return {"weights": "fake-135M", "KV format": kv_format}

    def capabilities(self) -> dict[str, Any]:
        self._need_ok()
        return {
            "model": "fake-135M", "device": "cpu", "dtype": "int8", "kv_format": "fp16", "block_size": BLOCK,
            "max_seq_len": self.max_seq_len, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64,
            "bytes_per_token": 23040, "groups": [{"window": None, "sinks": 0, "layers": 30}],
            "vocab_size": 1 << 20, "chat_template": "fake", "warnings": self.warnings,
        }  # fmt: skip

    def _need_ok(self) -> None:
        if self.state != "ok":
            raise EngineStopped("The model is still loading." if self.state == "loading" else "The engine has stopped.")


def fake_chat(path: Any, **engine: Any) -> ChatService:
    """A real conversation service over a store at `path` and a `FakeEngine`."""
    return ChatService(SessionStore(path), FakeEngine(**engine))  # type: ignore[arg-type]


def _reusable(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """One token is always evaluated."""
    return min(common_prefix_len(cached, prompt), max(len(prompt) - 1, 0))
