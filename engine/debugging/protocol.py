"""What the debugging view asks of an engine: its queries, and the calls that take them. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine.jobs import never
from engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenMeasure:
    """One sampled token under the model itself, before penalties, bias, temperature and filters.

    Natural log probability of the token; its rank (0: the likeliest); entropy of all tokens' probabilities in nats;
    probability of the likeliest token.
    """

    logprob: float
    rank: int
    entropy: float
    top1: float


@dataclass(frozen=True, slots=True)
class ProbeQuery:
    """`tensor` is "k" or "v"; positions `start : start + count` as far as they are cached; the first `dims` values of
    each, None for ten or, where a head has fewer, all."""

    tensor: str = "k"
    layer: int = 0
    head: int = 0
    start: int = 0
    count: int = 10
    dims: int | None = None


@dataclass(frozen=True, slots=True)
class MapQuery:
    """`what` is one of `engine.debugging.maps.WHAT`, of KV head `head` or of all together, in at most `columns`
    stretches of positions."""

    what: str = "k_norm"
    head: int | None = None
    columns: int = 256


@dataclass(frozen=True, slots=True)
class ValueQuery:
    """One cached row: `tensor` "k" or "v" of a layer and KV head at a position."""

    tensor: str = "k"
    layer: int = 0
    head: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class PrecisionQuery:
    """`token_ids` are run in float32 and in `kv_format` (None: the cache's own); the last `count` are compared."""

    token_ids: tuple[int, ...]
    count: int = 64
    kv_format: str | None = None


@dataclass(frozen=True, slots=True)
class TokenQuery:
    """Tokens `start : start + count` of the reply `reply_ids` to the prompt `prompt_ids`."""

    session_id: str
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    start: int = 0
    count: int = 64


@dataclass(frozen=True, slots=True)
class DiagnoseQuery:
    """A stored reply, and all that it was made with: `params` with its seed, the KV format (None: that of now).

    `measures` are those taken while it was sampled, as far as there are any that belong to this prompt. `max_tokens`
    bounds how many tokens each replay draws; `cancelled` is asked after each slice.
    """

    session_id: str
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    params: SamplingParams
    measures: tuple[TokenMeasure, ...] = ()
    kv_format: str | None = None
    max_tokens: int | None = None
    cancelled: Callable[[], bool] = never


@dataclass(frozen=True, slots=True)
class FaultRequest:
    """Damage to do to a session's cached K and V at `start : start + count`; `layer` None: in all layers.

    `kind` is one of `engine.debugging.faults.KINDS`; `amount` is the shift or rotation in positions, or a factor.
    """

    session_id: str
    kind: str
    layer: int | None = 0
    start: int = 0
    count: int = 1
    amount: float | None = None


class DebuggingEngine(Protocol):
    """The part of `ChatEngine` that finds out why a model says what it says. Every method is safe from any thread."""

    def probe(self, session_id: str, query: ProbeQuery) -> list[dict[str, Any]]:
        """Cached values at some positions, as the kernel reads them: `{position, token_id, token, values, norm}`."""
        ...

    def cache_map(self, session_id: str, query: MapQuery) -> dict[str, Any]:
        """Norms or similarities of a session's cached keys or values, as in `GET …/cache/map`; replies go on meanwhile.

        Raises `InvalidRequest`, and `Conflict` if nothing is in the cache, or the chat changes meanwhile.
        """
        ...

    def cached_values(self, session_id: str, query: ValueQuery) -> dict[str, Any]:
        """A cached row beside what it was before rounding, as in `GET …/cache/values`. Raises as `cache_map`."""
        ...

    def compare_precision(self, query: PrecisionQuery) -> dict[str, Any]:
        """What a KV format costs these ids, as in `POST /api/sessions/{id}/compare`; replies go on meanwhile.

        Raises `InvalidRequest`, also if the memory for it can't be had, and `ContextOverflow`.
        """
        ...

    def token_table(self, query: TokenQuery) -> list[dict[str, Any]]:
        """What the model thought of each token of a reply and where its K and V lie, as in `GET …/tokens`."""
        ...

    def token_places(self, query: TokenQuery) -> list[dict[str, Any]]:
        """The part of `token_table` that needs no replay: `{block, slot, origin}` of each token."""
        ...

    def diagnose(self, query: DiagnoseQuery, audit: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Who made a reply loop, as in `POST /api/sessions/{id}/diagnose`; `audit` is what an audit of its cache found.

        Raises `InvalidRequest`, `Stopped` if it was cancelled, and what `compare_precision` raises.
        """
        ...

    def audit(
        self, session_id: str, positions: int | list[int] | None = None, cancelled: Callable[[], bool] = never
    ) -> dict[str, Any]:
        """Recompute a session's cache and compare, as in `POST /api/sessions/{id}/audit`; replies go on meanwhile.

        `positions`: how many to look at, or which (None: all); `cancelled` is asked after each slice. Raises `Conflict`
        while the session is answering, `Stopped` if it was cancelled, and `InvalidRequest`.
        """
        ...

    def repair(self, session_id: str, cancelled: Callable[[], bool] = never) -> dict[str, Any]:
        """Audit if need be, cut the cache before the first wrong position and compute the rest again:
        `{cut_tokens, recomputed_tokens, first_position, cache_pos, sentence}`; the two differ by what other sessions'
        blocks hold. Raises as `audit`."""
        ...

    def inject(self, request: FaultRequest) -> dict[str, Any]:
        """Damage a session's own copy of its cache. Raises `Forbidden` unless that was allowed at the start,
        `InvalidRequest` and `Conflict`."""
        ...

    def trace(self, session_id: str) -> dict[str, Any]:
        """Where the time of a session's last turns went, as in `GET /api/sessions/{id}/trace`."""
        ...
