"""Which replies run drafts in a step, and how many: n-gram speculation without a second model.

A draft is the continuation of an earlier place in the same ids. It is run beside the token that is due, and from each
of its rows is drawn what that reply's next step would draw, with the same random number; what was drawn is the reply,
as long as it is what the next row was run with. So a reply is the same with drafts and without, whatever they guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.model_runner import ModelRunner
from engine.sampling.prompt_lookup import NO_GUESS, Guess, PromptLookup
from engine.sampling.step_costs import StepCosts
from engine.scheduler import ScheduledBatch, ScheduledItem
from engine.turns.turn import ActiveTurn

MOST_DRAFTS = 7
"""Of one reply in a step: eight rows are two tiles on a processor, and the most that a card multiplies like one."""
FIXED_DRAFTS = 3
"""Of one reply in a step where drafts are run whether they pay or not."""


class Speculation:
    """Of one step loop; `mode` is that of replies that ask for none. Steps that run a prompt too have no drafts:
    somebody waits for their first token."""

    def __init__(self, runner: ModelRunner, mode: str) -> None:
        self._runner, self._mode = runner, mode
        self.costs = StepCosts(runner.step_size)

    def begin(self, turn: ActiveTurn) -> None:
        """Give a turn an index to guess from, where its drafts can be run. Beams choose between steps, and ids that are
        given need no guess."""
        request = turn.request
        given = request.forced_ids is not None or request.beams.searches
        if self._mode_of(turn) != "off" and not given and self._runner.verifies(turn.sampling):
            turn.lookup = PromptLookup()

    def extend(self, batch: ScheduledBatch, turns: Sequence[ActiveTurn]) -> ScheduledBatch:
        """The same batch with drafts, whose slots are reserved; `turns` are those of its items."""
        decodes = all(item.count == 1 and item.wants_logits for item in batch.items)
        if not decodes or all(turn.lookup is None for turn in turns):
            return batch
        guesses = [_guess(turn) for turn in turns]
        counts = self._counts(turns, guesses)
        items = [
            _with_drafts(item, guess.token_ids[:count])
            for item, guess, count in zip(batch.items, guesses, counts, strict=True)
        ]
        return ScheduledBatch(tuple(items))

    def ran(self, batch: ScheduledBatch, seconds: float) -> None:
        """A batch took so long."""
        if all(item.known == 1 and item.wants_logits for item in batch.items):
            self.costs.add(batch.token_count, seconds, any(item.drafts for item in batch.items))

    def _counts(self, turns: Sequence[ActiveTurn], guesses: list[Guess]) -> list[int]:
        """How many drafts of each guess to run; in all no more than a step has room for."""
        counts, chances = [0] * len(turns), []
        room = max(self._runner.most_rows - len(turns), 0)
        for index, (turn, guess) in enumerate(zip(turns, guesses, strict=True)):
            if self._mode_of(turn) == "on":
                counts[index] = min(len(guess.token_ids), FIXED_DRAFTS, room)
                room -= counts[index]
            elif turn.lookup is not None:
                own = turn.lookup.acceptance.chances(guess.match, len(guess.token_ids))
                chances += [(chance, index) for chance in own]
        chances.sort(key=lambda entry: -entry[0])  # a reply's own stay in order: no later draft is likelier
        rows = len(turns) + sum(counts)
        for _, index in chances[: self.costs.worth_running(rows, [chance for chance, _ in chances[:room]])]:
            counts[index] += 1
        return counts

    def _mode_of(self, turn: ActiveTurn) -> str:
        return turn.request.params.speculation or self._mode


def _guess(turn: ActiveTurn) -> Guess:
    """What may follow, as far as the reply may go."""
    if turn.lookup is None:
        return NO_GUESS
    guess = turn.lookup.guess(turn.sequence.token_ids, MOST_DRAFTS)
    return replace(guess, token_ids=turn.useful(guess.token_ids))


def _with_drafts(item: ScheduledItem, drafts: tuple[int, ...]) -> ScheduledItem:
    """As many as there are free slots for: nothing is taken from anybody for a guess."""
    sequence = item.sequence
    drafts = drafts[: sequence.free_slots]
    if not drafts:
        return item
    sequence.reserve(len(sequence.token_ids) + len(drafts))
    return replace(item, count=item.count + len(drafts), drafts=drafts)
