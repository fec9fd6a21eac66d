"""The border of the engine: what goes in, what comes out. No torch here; page, HTTP routes and tests use this."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.debugging.protocol import DebuggingEngine, TokenMeasure
from engine.errors import KVScopeError
from engine.sampling.beam import BeamParams
from engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a prompt. `token_ids` are the ids the model itself produced for it, when that is known."""

    role: str
    content: str
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start:end` of a prompt that belong to message `message` (index into the rendered messages)."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation: the ids the model will see and which message each reply's tokens came from."""

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Miss:
    """Why cached tokens were dropped. Positions and counts are in tokens; ids are None where there is no token.

    `detail` is a sentence where more than the cause is known. The texts are those of a few tokens before the position,
    and behind it on both sides. `ms_lost`: what evaluating so many tokens takes at this turn's own speed.
    """

    position: int
    cause: str
    cached_token: int | None
    wanted_token: int | None
    tokens_lost: int
    detail: str | None = None
    text_before: str = ""
    text_cached: str = ""
    text_wanted: str = ""
    ms_lost: float | None = None


@dataclass(frozen=True, slots=True)
class Loop:
    """A reply that repeats itself: from its token `start` on, `repeats` whole periods of `period` tokens so far.

    `near`: not every period is the same, but most of each is; `start` is then where that was first noticed.
    """

    period: int
    start: int
    repeats: int
    near: bool = False


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """Something that took from `start` to `end`, in seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One reply to produce. Without `session_id` the cache is read and shared, but belongs to no session.

    `cause` says what the caller did to the history ("edit", "regenerate", ...), for the `Miss` if one occurs;
    `stored_cache_pos` how many tokens the session's last turn had cached, so that a cache lost by a restart is told.
    `forced_ids` are used in place of sampled ids, one per step; they take the same way through cache, stop check and
    detokenizer. After the last one the reply ends. With more than one beam nothing is drawn: `params` says when the
    reply ends, and its text comes as a whole. `before`: what was done for it until now, for the timeline.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    session_id: str | None = None
    cause: str | None = None
    stored_cache_pos: int = 0
    forced_ids: tuple[int, ...] | None = None
    beams: BeamParams = field(default_factory=BeamParams)
    before: tuple[TimedSpan, ...] = ()
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probability of a token under the model (before temperature and filters), and the best others."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TurnStats:
    """The numbers of one turn; times in milliseconds. The API's `kvscope` object has exactly these fields.

    `loop` is the last loop that was found in the reply so far.
    `violation`: the first invariant of the cache that did not hold during the turn, as a sentence.
    `drafted_tokens` were guessed and run ahead, `accepted_tokens` of them came true (`engine.turns.speculation`).
    """

    session_id: str | None
    cache_pos: int
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    generated_tokens: int
    ttft_ms: float | None
    prefill_ms: float
    decode_tokens_per_s: float | None
    finish_reason: str | None
    seed: int
    miss: Miss | None
    loop: Loop | None = None
    violation: str | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`stats.cache_pos` of `stats.prompt_tokens` prompt tokens are in the cache; no token has been sampled yet."""

    stats: TurnStats


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens and the text that became final with them (may be empty while a character is incomplete).

    `measures` has one entry per token where they are taken (sampling on the host), else none.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    stats: TurnStats
    measures: tuple[TokenMeasure, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is over: "stop" (end token, stop string), "length", or "cancelled".

    `text` is the whole reply, `token_ids` the ids of the history: `decode(token_ids) == text`, end marker left out.
    """

    text: str
    token_ids: tuple[int, ...]
    stats: TurnStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The reply ended with an error; what was streamed before stays valid, the cache is as before the turn."""

    error: KVScopeError
    stats: TurnStats | None = None


Event = PrefillProgress | TokenDelta | Finished | Failed


class EventStream(Protocol):
    """Events of one request, in order; the last is `Finished` or `Failed`. Iterating blocks; one reader only."""

    request_id: str

    def __iter__(self) -> Iterator[Event]: ...

    def cancel(self) -> None:
        """Ask for the end; a `Finished` with reason "cancelled" follows. Safe from any thread, any number of times."""
        ...


class ChatEngine(DebuggingEngine, Protocol):
    """What the page, the routes and tests need of an engine. Every method is safe from any thread."""

    def generate(self, request: GenerateRequest) -> EventStream:
        """Queue one reply. Raises `InvalidRequest`, `ContextOverflow`, `Conflict` (session busy), `EngineStopped`."""
        ...

    def cached_prefix(self, session_id: str | None, prompt_ids: Sequence[int]) -> int:
        """Tokens of this prompt that would be reused if it were sent now."""
        ...

    def release(self, session_id: str) -> None:
        """Forget the session's cache and delete its snapshot, also while no model is loaded. Unknown ids are fine."""
        ...

    def fork(self, session_id: str, new_session_id: str, token_ids: Sequence[int]) -> None:
        """Give a new session with the history `token_ids` what is cached of it, sharing full blocks."""
        ...

    def snapshot(self, session_id: str) -> dict[str, Any]:
        """Write the session's cache to disk now; then as `snapshot_info`.

        Raises `Conflict` while it is answering, `NotFound` if nothing is cached, `StorageFailed`, and `InvalidRequest`
        where no snapshots are kept.
        """
        ...

    def snapshot_info(self, session_id: str) -> dict[str, Any]:
        """What is on disk of a session: `{session_id, bytes, tokens, blocks, files, fingerprint, created_at, age_s,
        refused}`. Raises `NotFound`, and `InvalidRequest` where no snapshots are kept."""
        ...

    def restore(self, session_id: str) -> int:
        """Bring back what is kept of a session outside the pool; the tokens in its cache then.

        Done by itself before a turn. 0 if there is nothing, no room, or what there is was refused (`inspect` says why).
        """
        ...

    def stored_sessions(self) -> Sequence[str]:
        """Sessions of which something is on disk."""
        ...

    def freeze(self, text: str, title: str | None = None) -> dict[str, Any]:
        """Compute what chats with this system prompt begin with, and keep it on disk; its entry of `frozen`.

        `title` (None: the text's beginning) goes into the name. Raises `InvalidRequest`, `ContextOverflow`,
        `StorageFailed`, and `Conflict` if the cache has no room for it beside running turns.
        """
        ...

    def frozen(self) -> list[dict[str, Any]]:
        """What is frozen: `{name, tokens, bytes, created_at, refused}`; prompts that begin so load it by themselves."""
        ...

    def unfreeze(self, name: str) -> None:
        """Delete what is frozen under a name. Raises `NotFound`."""
        ...

    def inspect(self, session_id: str) -> dict[str, Any]:
        """The cache of one session as in `GET /api/sessions/{id}/cache`."""
        ...

    def block(self, session_id: str, start: int) -> dict[str, Any]:
        """The block of `inspect` that begins at a position, with its `text`, and `turn` of the `turns` that wrote the
        cache. Raises `InvalidRequest` if there is none."""
        ...

    def memory(self) -> dict[str, Any]:
        """The ledger as in `GET /api/memory`, bytes."""
        ...

    def memory_history(self) -> dict[str, Any]:
        """The process's memory since the start, as in `GET /api/memory/history`."""
        ...

    def metrics(self) -> dict[str, Any]:
        """Counters and histograms since start, for `GET /metrics` and the panel."""
        ...

    def fingerprint(self, kv_format: str) -> dict[str, str]:
        """What has to be equal for ids and caches to mean the same, by names fit for a sentence."""
        ...

    def capabilities(self) -> dict[str, Any]:
        """Model name, device, dtype, KV format, `max_seq_len`, `block_size`, layer and head counts, warnings.

        `snapshots` and `snapshot_limit`: whether sessions are kept on disk, and the most bytes that they may take.
        """
        ...

    def close(self) -> None:
        """End running turns, then the thread. Later requests get `EngineStopped`."""
        ...
