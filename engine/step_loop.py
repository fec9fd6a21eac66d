"""One step of the engine: schedule, run, sample, commit, tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from engine.debugging.timeline import TurnTrace
from engine.errors import EngineStopped, KVScopeError, NonFiniteValues
from engine.jobs import Jobs
from engine.kv_cache.compaction import compact, is_sparse
from engine.kv_cache.held import SaveJob
from engine.kv_cache.integrity import check_integrity
from engine.kv_cache.origin import Origin
from engine.lane import Lane
from engine.loader import EngineParts
from engine.models.decoder import StepAbandoned
from engine.protocol import TokenLogprob
from engine.sampling.sampler import SampledLogprob
from engine.sampling.step import Drawn, StepTokens
from engine.scheduler import ScheduledBatch
from engine.sequence import Sequence
from engine.stats import TurnMeter
from engine.turns.beam_turn import BeamTurn
from engine.turns.running import RunningTurns
from engine.turns.speculation import Speculation
from engine.turns.turn import ActiveTurn

Taken = tuple[Sequence, list[Drawn]]
"""What was sampled for a sequence: one token, and one more for each draft that came true."""


class StepLoop(Lane):
    """A lane with its turns. Not thread-safe: only the engine thread calls it."""

    def __init__(
        self,
        parts: EngineParts,
        ram_limit: int = 0,
        submit: Callable[[SaveJob], None] | None = None,
        beside: StepLoop | None = None,
    ) -> None:
        super().__init__(parts, ram_limit, submit, beside)
        self.others_go_on: Callable[[], bool] = lambda: False
        self.speculation = Speculation(self.runner, parts.speculation)
        self.turns = RunningTurns(self, self.speculation)
        self.jobs = Jobs()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.keeper.has_unsaved or bool(self.jobs)

    def step(self) -> None:
        """Run one batch, or, when nothing is left to run, recount who owns what; then a slice of a longer job."""
        self._run_batch()
        if self.jobs:
            with self.runner.threads_for(self.scheduler.limits.mixed_batch_tokens):
                self.jobs.advance()

    def _run_batch(self) -> None:
        times = self.runner.times
        times.began = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            self._idle()
            return
        turns = [self.turns[item.sequence] for item in batch.items]
        batch = self.speculation.extend(batch, turns)
        self._unchecked = True
        for item, turn in zip(batch.items, turns, strict=True):
            turn.meter.admit(item.start)
        self.turns.tell(self.lights.before(batch))
        sampling = [turn for item, turn in zip(batch.items, turns, strict=True) if item.wants_logits]
        states, forced = [turn.sampling for turn in sampling], [turn.forced_id() for turn in sampling]
        streams = [turn.stream for turn in turns]
        shares = self._shares(batch)
        times.scheduled = time.perf_counter()
        try:
            tokens = self.runner.execute(batch, states, forced, lambda: all(stream.cancelled for stream in streams))
        except StepAbandoned:
            times.cut_short()
            for item in batch.items:
                item.sequence.distrust_state()
                item.sequence.truncate(item.sequence.cache_pos)
                if item.drafts:
                    item.sequence.trim()
        else:
            times.sampled = time.perf_counter()
            self.speculation.ran(batch, times.sampled - times.scheduled)
            self._commit(batch, tokens)
        record = times.record(time.perf_counter())
        for trace, (meter, decode, count, generated) in shares.items():
            trace.step(record, decode, meter.generated_tokens - generated if decode else count)
        self.keeper.save_next(busy=True)

    def _shares(self, batch: ScheduledBatch) -> dict[TurnTrace, tuple[TurnMeter, bool, int, int]]:
        """Of each turn in a step its meter, whether it decodes, its tokens, and how many it had generated before."""
        shares: dict[TurnTrace, tuple[TurnMeter, bool, int, int]] = {}
        for item in batch.items:
            turn = self.turns[item.sequence]
            decode, meter = item.start >= len(turn.request.prompt_ids), turn.meter
            shares[meter.trace] = (meter, decode, item.count, meter.generated_tokens)
        return shares

    def _commit(self, batch: ScheduledBatch, tokens: StepTokens) -> None:
        """What is finite is in the cache for good; the tokens of those that wanted one go into their replies."""
        results = tokens.by_item([item.row_count if item.wants_logits else 0 for item in batch.items])
        taken: list[Taken] = []
        for item, (finite, drawn) in zip(batch.items, results, strict=True):
            turn = self.turns.find(item.sequence)
            if turn is None:  # another beam of this turn has just ended it
                continue
            if not finite:
                self.turns.end(turn, turn.fail(NonFiniteValues("The model produced values that are not finite.")))
                continue
            replied = item.start >= len(turn.request.prompt_ids)
            item.sequence.advance(item.known, Origin.DECODE if replied else Origin.PREFILL)
            turn.meter.drafted_tokens += len(item.drafts)
            if item.wants_logits:
                taken.append((item.sequence, drawn))
            else:
                turn.report_prefill()
        self._take(taken)
        ran = [item.cut(item.known + len(drawn) - 1) if item.drafts else item
               for item, (_, drawn) in zip(batch.items, results, strict=True)]  # fmt: skip
        self.turns.tell(self.lights.after(ScheduledBatch(tuple(ran)), [finite for finite, _ in results]))

    def _take(self, taken: SequenceOf[Taken]) -> None:
        """What was sampled goes into the replies; beams choose once all of a turn have been run."""
        for sequence, drawn in taken:
            turn = self.turns.find(sequence)
            if isinstance(turn, BeamTurn):
                logprob = drawn[0][1]
                assert logprob is not None
                turn.take_top(sequence, logprob.top)
            elif turn is not None:
                self._end_if(turn, self._reply(turn, drawn))
        for turn in self.turns.active():
            if isinstance(turn, BeamTurn) and turn.all_run:
                self._count_token(turn, turn.meter.gap())
                self._end_if(turn, self.turns.select_beams(turn))

    def _reply(self, turn: ActiveTurn, drawn: SequenceOf[Drawn]) -> str | None:
        """The tokens of one step go into a reply one by one, as if each had had a step of its own; the finish reason if
        the reply is over. K and V of drafts that did not come true, or come after the end, lie past `cache_pos`."""
        reason, sequence, share = None, turn.sequence, turn.meter.gap(len(drawn))
        for index, (token_id, logprob, measure) in enumerate(drawn):
            if index:
                sequence.advance(1, Origin.DECODE)
                turn.meter.accepted_tokens += 1
            self._count_token(turn, share)
            reason = turn.accept(token_id, self._with_text(logprob), measure)
            if reason is not None:
                break
        sequence.trim()
        return reason

    def _count_token(self, turn: ActiveTurn, gap: float | None) -> None:
        turn.meter.token()
        if gap is not None:
            self.metrics.per_token.add(gap)

    def _end_if(self, turn: ActiveTurn, reason: str | None) -> None:
        if reason is not None:
            self.turns.end(turn, turn.finish(reason))

    def _with_text(self, logprob: SampledLogprob | None) -> TokenLogprob | None:
        if logprob is None:
            return None
        text = self.parts.tokenizer.token_text
        top = tuple((token_id, text(token_id), value) for token_id, value in logprob.top)
        return TokenLogprob(logprob.token_id, text(logprob.token_id), logprob.logprob, top)

    # -- between steps ----------------------------------------------------------------------------------------------

    def _idle(self) -> None:
        if self.scheduler.waiting:
            if self.others_go_on():  # in another format; what they hold comes free when they end
                return
            turn = self.turns[self.scheduler.waiting[0]]
            error = KVScopeError("The KV cache is too small for this turn.", code="kv_cache_full")
            self.turns.end(turn, turn.fail(error))
        elif self._unchecked:
            self.check_integrity()
            self._tidy()
            self._unchecked = False
        else:
            self.keeper.save_next(busy=False)

    def _tidy(self) -> None:
        """Give back extents above the highest used block; where much is empty below, move blocks down first."""
        cache, sequences = self.runner.cache, list(self.scheduler.sequences())
        self.runner.trim()
        if is_sparse(self.prefix_cache, cache.capacity_blocks, cache.blocks_per_extent):
            compact(self.prefix_cache, sequences)
            self.runner.trim()
            self.check_integrity()

    def give_back(self) -> bool:
        """Free what no running turn needs of this pool, one idle session at a time; false if there was nothing left."""
        freed = self.prefix_cache.evict(self.prefix_cache.evictable_count())
        if not (freed or self.scheduler.displace_one() or self.scheduler.displace_waiting()):
            return False
        self.prefix_cache.evict(self.prefix_cache.evictable_count())
        if not self.turns:
            compact(self.prefix_cache, list(self.scheduler.sequences()))
        self.runner.trim()
        return True

    def check_integrity(self) -> None:
        scheduled = dict.fromkeys(self.scheduler.sequences())
        ended = [seq for turn in self.turns.active() for seq in turn.sequences() if seq not in scheduled]
        check_integrity(self.prefix_cache, [*scheduled, *ended])

    def release(self, session_id: str) -> None:
        """Forget a session: its turn is cancelled, its blocks and what only it computed are freed."""
        self.turns.forget(session_id)
        sequence = self.scheduler.find(session_id)
        if sequence is not None:
            self.scheduler.idle.pop(session_id, None)
            sequence.release_blocks()
        self.prefix_cache.forget(session_id)
        self.keeper.forget(session_id)
        self.records.forget(session_id)
        self.lights.forget(session_id)
        self._unchecked = True

    def end_all(self, error: EngineStopped | None) -> None:
        """The engine stops: all that runs ends as cancelled, or with `error`."""
        self.jobs.close(self.turns.end_all(error))
