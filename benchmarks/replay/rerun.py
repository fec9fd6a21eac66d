"""A recorded session once more, turn by turn on a cache of its own: the same ids, or the token at which they part."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.replay.files import RecordedSession, RecordedTurn
from engine.errors import KVScopeError
from engine.kv_cache.prefixes import common_prefix_len
from engine.local import LocalEngine
from engine.protocol import Failed, Finished, GenerateRequest, TokenQuery, TurnStats
from engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one turn. `parted` is the index of the first token of the reply that is another one (or is missing on one
    side), None where all are the same; `sentence` is for a person."""

    turn: RecordedTurn
    parted: int | None
    sentence: str
    stats: TurnStats | None = None

    @property
    def failed(self) -> bool:
        return self.parted is not None


def rerun(engine: LocalEngine, session: RecordedSession) -> Iterator[Outcome]:
    """Turns in their order; those that can't be made again are passed over.

    Prompts are the recorded ones, so a turn that parts does not change what follows. Where a turn had found an empty
    cache it finds one now.
    """
    session_id = str(uuid.uuid4())
    for turn in session.usable:
        if turn.stats.get("reused_tokens") == 0:
            engine.release(session_id)
        yield _run(engine, session_id, turn)
    engine.release(session_id)


def replay_params(engine: LocalEngine, turn: RecordedTurn) -> SamplingParams:
    """The recorded settings, with as many tokens as were sampled: a reply that does not end there has parted."""
    own = engine.capabilities()["kv_format"]
    params = replace(turn.params, kv_format=None if turn.params.kv_format == own else turn.params.kv_format)
    return params if turn.beams.searches else replace(params, max_tokens=max(turn.generated, 1))


def _run(engine: LocalEngine, session_id: str, turn: RecordedTurn) -> Outcome:
    try:
        request = GenerateRequest(turn.prompt_ids, replay_params(engine, turn), session_id, beams=turn.beams)
        last = list(engine.generate(request))[-1]
    except KVScopeError as error:
        return Outcome(turn, 0, f"could not be run: {error}")
    if isinstance(last, Failed):
        return Outcome(turn, 0, f"failed: {last.error}")
    assert isinstance(last, Finished)
    common = common_prefix_len(turn.reply_ids, last.token_ids)
    if common == len(turn.reply_ids) == len(last.token_ids):
        return Outcome(turn, None, f"same {common} tokens", last.stats)
    then, now = (_named(engine, ids, common) for ids in (turn.reply_ids, last.token_ids))
    sentence = f"parted at token {common}: {then} was recorded, {now} came now"
    return Outcome(turn, common, sentence + _likelihoods(engine, session_id, turn, last.token_ids, common), last.stats)


def _named(engine: LocalEngine, ids: tuple[int, ...], index: int) -> str:
    return f"{engine.tokenizer.token_text(ids[index])!r} (id {ids[index]})" if index < len(ids) else "the end"


def _likelihoods(engine: LocalEngine, session_id: str, turn: RecordedTurn, now: tuple[int, ...], index: int) -> str:
    """How likely both tokens are by a fresh prefill: all but equal ones may change places by rounding alone."""
    if index >= min(len(turn.reply_ids), len(now)):
        return ""
    found = []
    for ids in (turn.reply_ids, now):
        try:
            row = engine.token_table(TokenQuery(session_id, turn.prompt_ids, ids[: index + 1], index, 1))[0]
        except KVScopeError:
            return ""
        found.append(f"{row['logprob']:.4f}")
    return f"; log probabilities {found[0]} and {found[1]}"
