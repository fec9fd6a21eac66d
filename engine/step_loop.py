"""What the engine thread does between two looks into its mailbox: schedule, run, sample, commit, tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.beam_turn import BeamTurn, scoring_params
from engine.debugging.invariants import InvariantLights, Violation
from engine.debugging.loops import LoopDetector, word_test
from engine.debugging.records import Records
from engine.debugging.timeline import Timeline, TurnTrace
from engine.errors import EngineStopped, KVScopeError, NonFiniteValues
from engine.fingerprint import fingerprint
from engine.jobs import Jobs
from engine.keeper import SessionKeeper
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.checkpoints import StateCheckpoints
from engine.kv_cache.compaction import compact, empty_slots, is_sparse
from engine.kv_cache.held import HeldBlocks, SaveJob
from engine.kv_cache.integrity import check_integrity
from engine.kv_cache.origin import Origin
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.window import BlockPlace
from engine.loader import EngineParts
from engine.miss import find_miss
from engine.model_runner import ModelRunner
from engine.models.decoder import StepAbandoned
from engine.prompt import effective_max_tokens
from engine.protocol import Failed, Finished, GenerateRequest, TimedSpan, TokenLogprob
from engine.restore import Restorer, audit_tolerance
from engine.sampling.sampler import SampledLogprob, SamplingState
from engine.sampling.step import Drawn, StepTokens
from engine.scheduler import ScheduledBatch, Scheduler
from engine.sequence import Sequence, common_prefix_len
from engine.speculation import Speculation
from engine.stats import EngineMetrics, TurnMeter
from engine.tokenizer.detokenizer import Detokenizer
from engine.turn import ActiveTurn, QueueStream

Taken = tuple[Sequence, list[Drawn]]
"""What was sampled for a sequence: one token, and one more for each draft that came true."""


@dataclass(frozen=True, slots=True)
class ExportedBlocks:
    """Blocks out of the pool: `places[row]` is where the block in row `row` of `tensors` (`KVCache.export_blocks`)
    stood."""

    places: tuple[BlockPlace, ...]
    tensors: dict[str, Tensor]


class StepLoop:
    """Turns, scheduler and runner of one engine. Not thread-safe: only the engine thread calls it."""

    def __init__(
        self,
        parts: EngineParts,
        ram_limit: int = 0,
        submit: Callable[[SaveJob], None] | None = None,
        beside: StepLoop | None = None,
    ) -> None:
        """`beside`: the loop of another KV format, whose RAM, disk and counters this one uses too."""
        self.parts = parts
        self.others_go_on: Callable[[], bool] = lambda: False
        self.on_loop: Callable[[str], None] = lambda session_id: None
        """Told the session whose reply has ended and repeats itself."""
        pool, spec = BlockPool(parts.max_blocks), parts.cache.spec
        slots = BlockPool(parts.state_slots) if parts.states is not None else None
        checkpoints = StateCheckpoints(slots) if slots is not None else None
        self.prefix_cache = PrefixCache(pool, spec.block_size, checkpoints, spec.num_layers > 0, spec.groups)
        self.scheduler = Scheduler(self.prefix_cache, parts.limits)
        limits = parts.limits
        self.runner = ModelRunner(
            parts.model, parts.cache, pool, parts.max_seq_len, limits.max_sequences, parts.states, slots
        )
        tolerance = audit_tolerance(parts.kv_format, parts.model)
        self._restorer = Restorer(self.prefix_cache, self.scheduler, self.runner, tolerance)
        self.keeper: SessionKeeper = SessionKeeper(
            self.scheduler,
            self.runner,
            self._restorer,
            ram_limit,
            submit,
            self.fingerprint,
            beside.keeper if beside is not None else None,
        )
        self.speculation = Speculation(self.runner, parts.speculation)
        self.metrics: EngineMetrics = beside.metrics if beside is not None else EngineMetrics()
        self.timeline: Timeline = beside.timeline if beside is not None else Timeline()
        self.jobs = Jobs()
        self.records = Records()
        self.lights = InvariantLights(self.prefix_cache)
        self._turns: dict[Sequence, ActiveTurn] = {}
        self._on_done: dict[str, Callable[[], None]] = {}
        self._last_beams: dict[str, list[dict[str, Any]]] = {}
        self._stopped: EngineStopped | None = None
        self._unchecked = False
        self._is_word = word_test(parts.tokenizer.shown_bytes)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.keeper.has_unsaved or bool(self.jobs)

    def fingerprint(self) -> dict[str, str]:
        """Of what runs now. Safe from any thread."""
        return fingerprint(self.parts)

    # -- commands from the mailbox ----------------------------------------------------------------------------------

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
        self.speculation.begin(turn)
        self._turns[sequence] = turn
        self._on_done[request.request_id] = on_done
        self.scheduler.add(sequence)
        if self._stopped:
            self._end(turn, turn.fail(self._stopped))

    def cancel(self, request_id: str) -> None:
        for turn in self._active():
            if turn.request.request_id == request_id:
                self._end(turn, turn.finish("cancelled"))

    def end_all(self, error: EngineStopped | None) -> None:
        """The engine stops: running turns end as cancelled, or with `error`; later ones fail at once."""
        self._stopped = error or EngineStopped("The engine has stopped; restart KVScope.")
        self.jobs.close(self._stopped)
        for turn in self._active():
            self._end(turn, turn.fail(error) if error else turn.finish("cancelled"))

    def cached_prefix(self, session_id: str | None, prompt_ids: SequenceOf[int]) -> int:
        """Tokens that a turn with this prompt would reuse; one token is always evaluated."""
        sequence = self.scheduler.find(session_id) if session_id else None
        own = 0
        if sequence is not None:
            common = common_prefix_len(sequence.token_ids[: sequence.cache_pos], prompt_ids)
            own = sequence.resume_point(max(min(common, len(prompt_ids) - 1), 0))
        return max(own, self.prefix_cache.shared(prompt_ids).count)

    def release(self, session_id: str) -> None:
        """Forget a session: its turn is cancelled, its blocks and what only it computed are freed."""
        sequence = self.scheduler.find(session_id)
        if sequence is not None:
            if sequence in self._turns:
                self._end(self._turns[sequence], self._turns[sequence].finish("cancelled"))
            self.scheduler.idle.pop(session_id, None)
            sequence.release_blocks()
        self.prefix_cache.forget(session_id)
        self.keeper.forget(session_id)
        self.records.forget(session_id)
        self.lights.forget(session_id)
        self._unchecked = True
        self._last_beams.pop(session_id, None)

    def beams(self, session_id: str) -> list[dict[str, Any]]:
        """The beams of a session's running turn, or of its last one; none if that was no beam search."""
        sequence = self.scheduler.find(session_id)
        turn = self._turns.get(sequence) if sequence is not None else None
        return turn.report() if isinstance(turn, BeamTurn) else self._last_beams.get(session_id, [])

    def adopt(self, session_id: str, held: HeldBlocks, displacing: bool) -> None:
        """Take a session's blocks that were read from disk. Raises `SnapshotRefused` and `NoRoom`."""
        self._unchecked = True
        began = time.perf_counter()
        self.keeper.adopt(session_id, held, displacing)
        self.timeline.restored(session_id, began)
        sequence = self.scheduler.find(session_id)
        if sequence is not None and self._restorer.compared:
            self.records.spot_audited(sequence, self._restorer.compared, self._restorer.tolerance)
            self._restorer.compared = []

    def adopt_prefix(self, held: HeldBlocks, displacing: bool) -> None:
        """Put blocks that belong to no session into the tree. Raises `SnapshotRefused` and `NoRoom`."""
        self._unchecked = True
        if self.prefix_cache.shared_blocks(held.token_ids[: held.cache_pos]) < held.cache_pos:
            self._restorer.restore(None, held, displacing=displacing, audit=True)

    def export_prefix(self, token_ids: SequenceOf[int]) -> ExportedBlocks | None:
        """The full blocks of these ids that are needed to go on after them; None where the tree lacks one, or there is
        none."""
        cache, size = self.prefix_cache, self.prefix_cache.block_size
        path, count = cache.match(token_ids), len(token_ids) - len(token_ids) % size
        if not count or cache.shared_blocks(token_ids) < count:
            return None
        indices, groups = range(count // size), range(len(cache.windows.groups))
        places = tuple((group, i) for i in indices for group in groups if cache.windows.needs(group, i, count))
        self.runner.sync_blocks()
        return ExportedBlocks(places, self.runner.cache.export_blocks([path[i].block_ids[g] for g, i in places]))

    def forget_prefix(self, token_ids: SequenceOf[int]) -> None:
        """Remove from the tree what of these ids belongs to no session and is not in use."""
        self.prefix_cache.forget(None, within=self.prefix_cache.match(token_ids))
        self._unchecked = True

    def bring_back(self, session_id: str) -> int:
        """Have a session's blocks in the pool if they are kept in RAM; its tokens in the cache then."""
        self.keeper.bring_back(session_id)
        sequence = self.scheduler.find(session_id)
        return sequence.cache_pos if sequence else 0

    def fork(self, session_id: str, new_session_id: str, token_ids: SequenceOf[int]) -> None:
        """Let a new session share what of the session's cache stands for `token_ids`."""
        source = self.scheduler.find(session_id)
        if source is None or self.scheduler.find(new_session_id) is not None:
            return
        usable = source.cache_pos if source.private_from is None else source.private_from
        count = common_prefix_len(source.token_ids[:usable], token_ids)
        self.scheduler.finish(source.fork(new_session_id, count))
        self.keeper.turn_ended(new_session_id)

    def use_parts(self, parts: EngineParts) -> None:
        """For turns to come: the same model and cache with another tokenizer."""
        self.parts = parts

    def metrics_report(self) -> dict[str, Any]:
        """Counters since start and gauges of now, for `GET /metrics`."""
        pool = self.prefix_cache.pool
        return {
            **self.metrics.snapshot(),
            "blocks_used": pool.used_count,
            "blocks_free": pool.free_count,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "kv_reserved_bytes": self.runner.cache.reserved_bytes,
            "kv_empty_bytes": self.empty_bytes(),
            "kv_ram_bytes": self.keeper.ram.nbytes,
        }

    def empty_bytes(self) -> int:
        """Bytes of the cache that are allocated and hold no token."""
        cache = self.runner.cache
        slots = empty_slots(self.prefix_cache, self.scheduler.sequences(), cache.capacity_blocks)
        return slots * cache.spec.group_bytes_per_token

    def check_integrity(self) -> None:
        scheduled = dict.fromkeys(self.scheduler.sequences())
        ended = [seq for turn in self._active() for seq in turn.sequences() if seq not in scheduled]
        check_integrity(self.prefix_cache, [*scheduled, *ended])

    # -- one step ---------------------------------------------------------------------------------------------------

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
        batch = self.speculation.extend(batch, self._turns)
        self._unchecked = True
        for item in batch.items:
            self._turns[item.sequence].meter.admit(item.start)
        self._tell(self.lights.before(batch))
        sampling = [self._turns[item.sequence] for item in batch.items if item.wants_logits]
        states, forced = [turn.sampling for turn in sampling], [turn.forced_id() for turn in sampling]
        streams = [self._turns[item.sequence].stream for item in batch.items]
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
            turn = self._turns[item.sequence]
            decode, meter = item.start >= len(turn.request.prompt_ids), turn.meter
            shares[meter.trace] = (meter, decode, item.count, meter.generated_tokens)
        return shares

    def _idle(self) -> None:
        if self.scheduler.waiting:
            if self.others_go_on():  # in another format; what they hold comes free when they end
                return
            turn = self._turns[self.scheduler.waiting[0]]
            self._end(turn, turn.fail(KVScopeError("The KV cache is too small for this turn.", code="kv_cache_full")))
        elif self._unchecked:
            self.check_integrity()
            self._tidy()
            self._unchecked = False
        else:
            self.keeper.save_next(busy=False)

    def give_back(self) -> bool:
        """Free what no running turn needs of this pool, one idle session at a time; false if there was nothing left."""
        freed = self.prefix_cache.evict(self.prefix_cache.evictable_count())
        if not (freed or self.scheduler.displace_one() or self.scheduler.displace_waiting()):
            return False
        self.prefix_cache.evict(self.prefix_cache.evictable_count())
        if not self._turns:
            compact(self.prefix_cache, list(self.scheduler.sequences()))
        self.runner.trim()
        return True

    def _tidy(self) -> None:
        """Give back extents above the highest used block; where much is empty below, move blocks down first."""
        cache, sequences = self.runner.cache, list(self.scheduler.sequences())
        self.runner.trim()
        if is_sparse(self.prefix_cache, cache.capacity_blocks, cache.blocks_per_extent):
            compact(self.prefix_cache, sequences)
            self.runner.trim()
            self.check_integrity()

    def _commit(self, batch: ScheduledBatch, tokens: StepTokens) -> None:
        """What is finite is in the cache for good; the tokens of those that wanted one go into their replies."""
        results = tokens.by_item([item.row_count if item.wants_logits else 0 for item in batch.items])
        taken: list[Taken] = []
        for item, (finite, drawn) in zip(batch.items, results, strict=True):
            turn = self._turns.get(item.sequence)
            if turn is None:  # another beam of this turn has just ended it
                continue
            if not finite:
                self._end(turn, turn.fail(NonFiniteValues("The model produced values that are not finite.")))
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
        self._tell(self.lights.after(ScheduledBatch(tuple(ran)), [finite for finite, _ in results]))

    def _tell(self, broken: SequenceOf[tuple[Sequence, Violation]]) -> None:
        """The first invariant that does not hold goes into the turn's numbers."""
        for sequence, violation in broken:
            turn = self._turns.get(sequence)
            if turn is not None and turn.meter.violation is None:
                turn.meter.violation = violation.sentence

    def _take(self, taken: SequenceOf[Taken]) -> None:
        """What was sampled goes into the replies; beams choose once all of a turn have been run."""
        for sequence, drawn in taken:
            turn = self._turns.get(sequence)
            if isinstance(turn, BeamTurn):
                logprob = drawn[0][1]
                assert logprob is not None
                turn.take_top(sequence, logprob.top)
            elif turn is not None:
                self._end_if(turn, self._reply(turn, drawn))
        for turn in self._active():
            if isinstance(turn, BeamTurn) and turn.all_run:
                self._count_token(turn, turn.meter.gap())
                self._end_if(turn, self._select_beams(turn))

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
            self._end(turn, turn.finish(reason))

    def _select_beams(self, turn: BeamTurn) -> str | None:
        """Every beam has been run: who goes on; the finish reason if the search is over."""
        for sequence in turn.beams:
            del self._turns[sequence]
        over = turn.select(self.scheduler)
        self._turns.update(dict.fromkeys(turn.beams, turn))
        return turn.write_best() if over else None

    def _with_text(self, logprob: SampledLogprob | None) -> TokenLogprob | None:
        if logprob is None:
            return None
        text = self.parts.tokenizer.token_text
        top = tuple((token_id, text(token_id), value) for token_id, value in logprob.top)
        return TokenLogprob(logprob.token_id, text(logprob.token_id), logprob.logprob, top)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _fetch(self, session_id: str) -> None:
        """Have in the pool what is kept of a session whose turn is about to be queued."""
        began, in_ram = time.perf_counter(), self.keeper.ram.find(session_id) is not None
        self.keeper.before_turn(session_id)
        if in_ram:
            self.timeline.restored(session_id, began)

    def _sequence_for(self, session_id: str | None) -> Sequence:
        sequence = self.scheduler.find(session_id) if session_id else None
        return sequence or Sequence(self.prefix_cache, session_id)

    def _make_turn(
        self, request: GenerateRequest, sequence: Sequence, stream: QueueStream, submitted: float
    ) -> ActiveTurn:
        began, params, tokenizer = time.perf_counter(), request.params, self.parts.tokenizer
        if request.beams.searches:
            params = scoring_params(request, 0 if params.ignore_eos else len(tokenizer.eos_ids))
        sampling = SamplingState(params, request.prompt_ids, self.parts.vocab_size)
        meter = TurnMeter(request.session_id, len(request.prompt_ids), sampling.seed, submitted)
        meter.loops = LoopDetector(self._is_word)
        max_tokens = effective_max_tokens(len(request.prompt_ids), self.parts.max_seq_len, request.params.max_tokens)
        detokenizer = Detokenizer(tokenizer, request.params.stop)
        shared = self.prefix_cache.shared(request.prompt_ids).count
        meter.miss = find_miss(sequence, request, tokenizer, shared, self.keeper.loss(request.session_id))
        cached = sequence.token_ids[: sequence.cache_pos]
        if request.session_id is not None:
            self.records.replaced(request.session_id, cached, request.prompt_ids)
        sequence.truncate(min(common_prefix_len(cached, request.prompt_ids), len(request.prompt_ids) - 1))
        sequence.set_tokens(request.prompt_ids)
        sequence.turn_id = request.request_id
        self.lights.begin(sequence)
        meter.trace = TurnTrace(request.request_id, submitted, request.before)
        meter.trace.preparing.append(TimedSpan("match", began, time.perf_counter()))
        self.timeline.begin(request.session_id, meter.trace)
        self._last_beams.pop(request.session_id or "", None)
        if request.beams.searches:
            return BeamTurn(request, sequence, sampling, detokenizer, meter, stream, max_tokens, tokenizer)
        return ActiveTurn(request, sequence, sampling, detokenizer, meter, stream, max_tokens, tokenizer.eos_ids)

    def _active(self) -> list[ActiveTurn]:
        """Each turn once, however many sequences it has."""
        return list(dict.fromkeys(self._turns.values()))

    def _end(self, turn: ActiveTurn, event: Finished | Failed) -> None:
        for sequence in turn.sequences():
            self._turns.pop(sequence, None)
        if isinstance(turn, BeamTurn):
            turn.drop_others(self.scheduler)
            if turn.request.session_id is not None:
                self._last_beams[turn.request.session_id] = turn.last_report
        self.scheduler.finish(turn.sequence)
        if turn.sequence.session_id is not None:
            self.keeper.turn_ended(turn.sequence.session_id)
        self._on_done.pop(turn.request.request_id)()
        turn.meter.trace.end(event.stats)
        if event.stats is not None:
            self.metrics.turn_ended(event.stats)
            if event.stats.loop is not None and turn.sequence.session_id is not None:
                self.on_loop(turn.sequence.session_id)
        turn.stream.put(event)
