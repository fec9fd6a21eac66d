"""The turns that run now: how one begins and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from engine.debugging.invariants import Violation
from engine.debugging.loops import LoopDetector, word_test
from engine.debugging.timeline import TurnTrace
from engine.errors import EngineStopped, KVScopeError
from engine.kv_cache.prefixes import common_prefix_len
from engine.lane import Lane
from engine.prompt import effective_max_tokens
from engine.protocol import Failed, Finished, GenerateRequest, TimedSpan
from engine.sampling.sampler import SamplingState
from engine.sequence import Sequence
from engine.stats import TurnMeter
from engine.tokenizer.detokenizer import Detokenizer
from engine.turns.beam_turn import BeamTurn, scoring_params
from engine.turns.miss import find_miss
from engine.turns.speculation import Speculation
from engine.turns.turn import ActiveTurn, QueueStream


class RunningTurns:
    """Of one lane, by the sequences that they run. Lives on the engine thread."""

    def __init__(self, lane: Lane, speculation: Speculation) -> None:
        self._lane, self._speculation = lane, speculation
        self._turns: dict[Sequence, ActiveTurn] = {}
        self._on_done: dict[str, Callable[[], None]] = {}
        self._last_beams: dict[str, list[dict[str, Any]]] = {}
        self._stopped: EngineStopped | None = None
        self._is_word = word_test(lane.parts.tokenizer.shown_bytes)

    def __bool__(self) -> bool:
        return bool(self._turns)

    def __getitem__(self, sequence: Sequence) -> ActiveTurn:
        return self._turns[sequence]

    def find(self, sequence: Sequence) -> ActiveTurn | None:
        """None for one whose turn is over."""
        return self._turns.get(sequence)

    def active(self) -> list[ActiveTurn]:
        """Each turn once, however many sequences it has."""
        return list(dict.fromkeys(self._turns.values()))

    def start(
        self, request: GenerateRequest, stream: QueueStream, on_done: Callable[[], None], submitted: float
    ) -> None:
        """Queue a turn: cut the session's cache to what the prompt shares with it, and let the scheduler have it.

        `submitted`: when it was asked for, in seconds of `time.perf_counter`.
        """
        turn: ActiveTurn | None = None
        if request.session_id is not None:
            self._fetch(request.session_id)
        sequence = self._sequence_for(request.session_id)
        try:
            turn = self._make_turn(request, sequence, stream, submitted)
        except KVScopeError as error:
            on_done()
            stream.fail(error)
            return
        self._speculation.begin(turn)
        self._turns[sequence] = turn
        self._on_done[request.request_id] = on_done
        self._lane.scheduler.add(sequence)
        if self._stopped:
            self.end(turn, turn.fail(self._stopped))

    def cancel(self, request_id: str) -> None:
        for turn in self.active():
            if turn.request.request_id == request_id:
                self.end(turn, turn.finish("cancelled"))

    def end_all(self, error: EngineStopped | None) -> EngineStopped:
        """The engine stops: running turns end as cancelled, or with `error`; later ones fail at once, with what is
        returned."""
        self._stopped = error or EngineStopped("The engine has stopped; restart KVScope.")
        for turn in self.active():
            self.end(turn, turn.fail(error) if error else turn.finish("cancelled"))
        return self._stopped

    def end(self, turn: ActiveTurn, event: Finished | Failed) -> None:
        """Leave its sequence idle, and hand the stream its last event."""
        for sequence in turn.sequences():
            self._turns.pop(sequence, None)
        if isinstance(turn, BeamTurn):
            turn.drop_others(self._lane.scheduler)
            if turn.request.session_id is not None:
                self._last_beams[turn.request.session_id] = turn.last_report
        self._lane.scheduler.finish(turn.sequence)
        if turn.sequence.session_id is not None:
            self._lane.keeper.turn_ended(turn.sequence.session_id)
        self._on_done.pop(turn.request.request_id)()
        turn.meter.trace.end(event.stats)
        if event.stats is not None:
            self._lane.metrics.turn_ended(event.stats)
            if event.stats.loop is not None and turn.sequence.session_id is not None:
                self._lane.on_loop(turn.sequence.session_id)
        turn.stream.put(event)

    def forget(self, session_id: str) -> None:
        """End a session's turn, if one runs, and what is remembered of the last one."""
        sequence = self._lane.scheduler.find(session_id)
        turn = self._turns.get(sequence) if sequence is not None else None
        if turn is not None:
            self.end(turn, turn.finish("cancelled"))
        self._last_beams.pop(session_id, None)

    def beams(self, session_id: str) -> list[dict[str, Any]]:
        """The beams of a session's running turn, or of its last one; none if that was no beam search."""
        sequence = self._lane.scheduler.find(session_id)
        turn = self._turns.get(sequence) if sequence is not None else None
        return turn.report() if isinstance(turn, BeamTurn) else self._last_beams.get(session_id, [])

    def select_beams(self, turn: BeamTurn) -> str | None:
        """Every beam has been run: who goes on; the finish reason if the search is over."""
        for sequence in turn.beams:
            del self._turns[sequence]
        over = turn.select(self._lane.scheduler)
        self._turns.update(dict.fromkeys(turn.beams, turn))
        return turn.write_best() if over else None

    def tell(self, broken: Iterable[tuple[Sequence, Violation]]) -> None:
        """The first invariant that does not hold goes into the turn's numbers."""
        for sequence, violation in broken:
            turn = self._turns.get(sequence)
            if turn is not None and turn.meter.violation is None:
                turn.meter.violation = violation.sentence

    def _fetch(self, session_id: str) -> None:
        """Have in the pool what is kept of a session whose turn is about to be queued."""
        began, in_ram = time.perf_counter(), self._lane.keeper.ram.find(session_id) is not None
        self._lane.keeper.before_turn(session_id)
        if in_ram:
            self._lane.timeline.restored(session_id, began)

    def _sequence_for(self, session_id: str | None) -> Sequence:
        sequence = self._lane.scheduler.find(session_id) if session_id else None
        return sequence or Sequence(self._lane.prefix_cache, session_id)

    def _make_turn(
        self, request: GenerateRequest, sequence: Sequence, stream: QueueStream, submitted: float
    ) -> ActiveTurn:
        began, params, tokenizer = time.perf_counter(), request.params, self._lane.parts.tokenizer
        if request.beams.searches:
            params = scoring_params(request, 0 if params.ignore_eos else len(tokenizer.eos_ids))
        sampling = SamplingState(params, request.prompt_ids, self._lane.parts.vocab_size)
        meter = TurnMeter(request.session_id, len(request.prompt_ids), sampling.seed, submitted)
        meter.loops = LoopDetector(self._is_word)
        context = self._lane.parts.max_seq_len
        max_tokens = effective_max_tokens(len(request.prompt_ids), context, request.params.max_tokens)
        detokenizer = Detokenizer(tokenizer, request.params.stop)
        shared = self._lane.prefix_cache.shared(request.prompt_ids).count
        meter.miss = find_miss(sequence, request, tokenizer, shared, self._lane.keeper.loss(request.session_id))
        cached = sequence.token_ids[: sequence.cache_pos]
        if request.session_id is not None:
            self._lane.records.replaced(request.session_id, cached, request.prompt_ids)
        sequence.truncate(min(common_prefix_len(cached, request.prompt_ids), len(request.prompt_ids) - 1))
        sequence.set_tokens(request.prompt_ids)
        sequence.turn_id = request.request_id
        self._lane.lights.begin(sequence)
        meter.trace = TurnTrace(request.request_id, submitted, request.before)
        meter.trace.preparing.append(TimedSpan("match", began, time.perf_counter()))
        self._lane.timeline.begin(request.session_id, meter.trace)
        self._last_beams.pop(request.session_id or "", None)
        if request.beams.searches:
            return BeamTurn(request, sequence, sampling, detokenizer, meter, stream, max_tokens, tokenizer)
        return ActiveTurn(request, sequence, sampling, detokenizer, meter, stream, max_tokens, tokenizer.eos_ids)
