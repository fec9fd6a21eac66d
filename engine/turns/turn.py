"""One reply in the making: its request, its sequence, its sampler state, its text so far, and the way out."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from engine.debugging.protocol import TokenMeasure
from engine.errors import KVScopeError
from engine.kv_cache.prefixes import common_prefix_len
from engine.protocol import Event, Failed, Finished, GenerateRequest, PrefillProgress, TokenDelta, TokenLogprob
from engine.sampling.prompt_lookup import PromptLookup
from engine.sampling.sampler import SamplingState
from engine.sequence import Sequence
from engine.stats import TurnMeter
from engine.tokenizer.detokenizer import Detokenizer


class QueueStream:
    """The engine's end and the reader's end of one request's events. The engine never waits for the reader."""

    def __init__(self, request_id: str, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._on_cancel = on_cancel
        self.cancelled = False
        """Set before the engine has time for it, so that a long step can be abandoned."""

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def fail(self, error: KVScopeError) -> None:
        self.put(Failed(error))

    def cancel(self) -> None:
        self.cancelled = True
        self._on_cancel()

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._queue.get()
            yield event
            if isinstance(event, Finished | Failed):
                return


class ActiveTurn:
    """State of a request between its first and its last event. Lives on the engine thread."""

    def __init__(
        self,
        request: GenerateRequest,
        sequence: Sequence,
        sampling: SamplingState,
        detokenizer: Detokenizer,
        meter: TurnMeter,
        stream: QueueStream,
        max_tokens: int,
        eos_ids: frozenset[int],
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.sampling = sampling
        self.lookup: PromptLookup | None = None
        """Where drafts come from, if this turn has any."""
        self.meter = meter
        self.stream = stream
        self._detokenizer = detokenizer
        self._max_tokens = max_tokens
        self._eos_ids = frozenset() if request.params.ignore_eos else eos_ids
        self._forced = iter(request.forced_ids) if request.forced_ids is not None else None

    def sequences(self) -> Iterator[Sequence]:
        """All that hold blocks for this turn."""
        yield self.sequence

    def forced_id(self) -> int | None:
        """The id to use in place of the sampled one, if the request brought its own."""
        return None if self._forced is None else next(self._forced, None)

    def useful(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Without those that would come after the reply's end; the step that runs them adds one more token."""
        kept = drafts[: max(self._max_tokens - self.meter.generated_tokens - 1, 0)]
        return next((kept[:index] for index, token_id in enumerate(kept) if token_id in self._eos_ids), kept)

    def report_prefill(self) -> None:
        self.stream.put(PrefillProgress(self.meter.stats(self.sequence.cache_pos)))

    def accept(self, token_id: int, logprob: TokenLogprob | None, measure: TokenMeasure | None = None) -> str | None:
        """Take one sampled token into the sequence and the text; the finish reason if the reply is over."""
        self.sequence.token_ids.append(token_id)
        if token_id in self._eos_ids:
            return "stop"
        self.meter.loops.push(token_id)
        began = time.perf_counter()
        text = self._detokenizer.push(token_id)
        self.meter.trace.detokenised(time.perf_counter() - began)
        logprobs = () if logprob is None else (logprob,)
        measures = () if measure is None else (measure,)
        stats = self.meter.stats(self.sequence.cache_pos)
        self.stream.put(TokenDelta((token_id,), text, logprobs, stats, measures))
        if self._detokenizer.stopped is not None:
            return "stop"
        if self.meter.generated_tokens >= self._max_tokens:
            return "length"
        if self.request.forced_ids is not None and self.meter.generated_tokens >= len(self.request.forced_ids):
            return "stop"
        return None

    def finish(self, reason: str) -> Finished:
        """Settle the history: the sequence keeps the ids of the text that was shown, and what of them is cached."""
        tail = self._detokenizer.finish()
        reply_ids = self._detokenizer.final_ids()
        self.settle((*self.request.prompt_ids, *reply_ids))
        stats = self.meter.stats(self.sequence.cache_pos, reason)
        if tail:
            self.stream.put(TokenDelta((), tail, (), stats))
        return Finished(self._detokenizer.text, reply_ids, stats)

    def fail(self, error: KVScopeError) -> Failed:
        """Back to where the turn began: what it added to the cache is dropped."""
        self.sequence.distrust_state()
        kept = self.meter.reused_tokens if self.meter.admitted is not None else self.sequence.cache_pos
        self.settle(self.request.prompt_ids[: min(kept, self.sequence.cache_pos)])
        return Failed(error, self.meter.stats(self.sequence.cache_pos, "error"))

    def settle(self, history: tuple[int, ...]) -> None:
        """Cut the cache to what it shares with `history`; of the rest, the sequence keeps the one token to run next.

        More than one is left over when a turn was stopped before its prompt was run, or when bytes that form no
        character were turned into text: the next prompt brings them again.
        """
        cached = self.sequence.token_ids[: self.sequence.cache_pos]
        self.sequence.truncate(common_prefix_len(cached, history))
        self.sequence.set_tokens(history[: self.sequence.cache_pos + 1])
