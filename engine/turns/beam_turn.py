"""A turn that searches with several beams: one sequence each, forked and dropped between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.prefixes import common_prefix_len
from engine.protocol import Finished, GenerateRequest
from engine.sampling.beam import BeamSearch, candidates_per_beam
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingState
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import TurnMeter
from engine.tokenizer import ChatTokenizer
from engine.tokenizer.detokenizer import Detokenizer
from engine.turns.turn import ActiveTurn, QueueStream

Top = SequenceOf[tuple[int, float]]
"""(token id, log probability) of the likeliest tokens after a beam."""


def scoring_params(request: GenerateRequest, end_tokens: int) -> SamplingParams:
    """Settings with which the sampler tells the likeliest tokens of a beam; the one that it draws is not used."""
    count = candidates_per_beam(request.beams.num_beams, end_tokens)
    return SamplingParams(temperature=0.0, top_logprobs=count, seed=request.params.seed)


class BeamTurn(ActiveTurn):
    """`beams[i]` holds the K and V of `search.live[i]`. All of them share the blocks of the prompt, and those of the
    reply as far as they agree; only a partly filled last block is copied.

    Beams that have ended keep the full blocks, so that the winner's are still there when it is known. A selection
    waits until every beam has been run; one that had to give its blocks up meanwhile comes back by its own ids.
    """

    def __init__(
        self,
        request: GenerateRequest,
        sequence: Sequence,
        sampling: SamplingState,
        detokenizer: Detokenizer,
        meter: TurnMeter,
        stream: QueueStream,
        max_tokens: int,
        tokenizer: ChatTokenizer,
    ) -> None:
        super().__init__(request, sequence, sampling, detokenizer, meter, stream, max_tokens, tokenizer.eos_ids)
        self.search = BeamSearch(request.beams, max_tokens, self._ends)
        self.beams = [sequence]
        self.last_report: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._scores = [0.0]
        self._tops: dict[Sequence, Top] = {}
        self._ended: dict[tuple[int, ...], Sequence] = {}
        self._written = False
        sequence.places = request.beams.num_beams

    def sequences(self) -> Iterator[Sequence]:
        yield from self.beams
        yield from self._ended.values()

    def take_top(self, sequence: Sequence, top: Top) -> None:
        """A beam has been run. It may be run again before the others are, after it had to give its blocks up."""
        self._tops[sequence] = top

    @property
    def all_run(self) -> bool:
        return all(beam in self._tops for beam in self.beams)

    def select(self, scheduler: Scheduler) -> bool:
        """Let the search choose, then fork and drop beams accordingly; True if the search is over."""
        parents = self.beams
        self.search.step([self._tops.pop(parent) for parent in parents])
        self._keep_ended(parents)
        if self.search.done:
            return True
        last_child = {beam.parent: index for index, beam in enumerate(self.search.live)}
        for index, parent in enumerate(parents):
            parent.places = 1
            if index not in last_child:
                self._drop(parent, scheduler)
        self.beams = []
        for index, beam in enumerate(self.search.live):
            child = parent = parents[beam.parent]
            if index != last_child[beam.parent]:
                child = self._fork(parent, parent.cache_pos)
            child.set_tokens((*self.request.prompt_ids, *beam.token_ids))
            self.beams.append(child)
            if child is not parent:
                scheduler.join(child)
        self.sequence = self.beams[0]
        self._scores = self.search.scores()
        return False

    def write_best(self) -> str | None:
        """Put the reply that won, or is best so far, into text and sequence; its finish reason, None if it is cut."""
        self._written = True
        self.last_report = self.report()
        best = self.search.best().token_ids
        history = (*self.request.prompt_ids, *best)

        def cached(sequence: Sequence) -> int:
            return common_prefix_len(sequence.token_ids[: sequence.cache_pos], history)

        self.sequence = max(self.sequences(), key=cached)
        self.sequence.truncate(cached(self.sequence))
        self.sequence.set_tokens(self.request.prompt_ids)
        self.meter.generated_tokens = 0
        for token_id in best:
            self.meter.generated_tokens += 1
            reason = self.accept(token_id, None)
            if reason is not None:
                return reason
        return None

    def finish(self, reason: str) -> Finished:
        if not self._written:
            self.write_best()
        return super().finish(reason)

    def drop_others(self, scheduler: Scheduler) -> None:
        """The turn is over: all but the sequence that was settled give their blocks back."""
        for sequence in self.sequences():
            if sequence is not self.sequence:
                self._drop(sequence, scheduler)

    def report(self) -> list[dict[str, Any]]:
        """`{score, tokens, block_table, shared_blocks, own_blocks}` of each running beam, best first.

        Shared is what another beam's table holds too.
        """
        tables = [[block_id for block_id in beam.block_table if block_id != NULL_BLOCK] for beam in self.beams]
        holders = Counter(block_id for table in tables for block_id in table)
        return [
            {
                "score": round(score, 6),
                "tokens": len(beam.token_ids) - len(self.request.prompt_ids),
                "block_table": list(table),
                "shared_blocks": sum(holders[block_id] > 1 for block_id in table),
                "own_blocks": sum(holders[block_id] == 1 for block_id in table),
            }
            for beam, score, table in zip(self.beams, self._scores, tables, strict=True)
        ]

    def _ends(self, token_ids: SequenceOf[int]) -> bool:
        if token_ids[-1] in self._eos_ids:
            return True
        if not self.request.params.stop:
            return False
        text = Detokenizer(self._tokenizer, self.request.params.stop)
        for token_id in token_ids:
            text.push(token_id)
        return text.stopped is not None

    def _keep_ended(self, parents: SequenceOf[Sequence]) -> None:
        known = {found.token_ids for found in self.search.finished}
        for token_ids in [token_ids for token_ids in self._ended if token_ids not in known]:
            self._ended.pop(token_ids).discard(len(self.request.prompt_ids))
        for found in self.search.finished:
            if found.token_ids not in self._ended:
                parent = parents[found.parent]
                full = parent.cache_pos - parent.cache_pos % parent.block_size
                self._ended[found.token_ids] = self._fork(parent, full)

    def _fork(self, parent: Sequence, token_count: int) -> Sequence:
        twin = parent.fork(parent.session_id, token_count)
        twin.turn_id = parent.turn_id
        return twin

    def _drop(self, sequence: Sequence, scheduler: Scheduler) -> None:
        scheduler.leave(sequence)
        sequence.discard(len(self.request.prompt_ids))
