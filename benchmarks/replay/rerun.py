"""Recorded sessions once more, turn by turn on a cache of their own: the same ids, or the token at which they part."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.replay.files import RecordedSession, RecordedTurn
from engine.debugging.protocol import TokenQuery
from engine.errors import KVScopeError
from engine.kv_cache.prefixes import common_prefix_len
from engine.local import LocalEngine
from engine.protocol import Failed, Finished, GenerateRequest, TurnStats
from engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one turn. `parted` is the index of the first token of the reply that is another one (or is missing on one
    side), None where all are the same; `sentence` is for a person."""

    turn: RecordedTurn
    parted: int | None
    sentence: str
    stats: TurnStats | None = None


def rerun(engine: LocalEngine, sessions: Sequence[RecordedSession]) -> Iterator[tuple[RecordedSession, Outcome]]:
    """Turns of all sessions in the order in which they were asked for; of those that can't be made again the outcome
    only says why.

    Prompts are the recorded ones, and behind a turn that parted the cache is brought to what it was: each turn is
    judged by itself.
    """
    names = [str(uuid.uuid4()) for _ in sessions]
    turns = [(turn.asked, index, turn) for index, session in enumerate(sessions) for turn in session.turns]
    for _, index, turn in sorted(turns, key=lambda item: (item[0], item[1], item[2].number)):
        if turn.skipped is not None:
            outcome = Outcome(turn, None, f"skipped: {turn.skipped}")
        else:
            outcome = _run(engine, names[index], turn)
            if outcome.parted is not None and outcome.stats is not None:
                _follow(engine, names[index], turn)
        yield sessions[index], outcome


def _prepare_cache(engine: LocalEngine, session_id: str, turn: RecordedTurn) -> None:
    """What a turn computes decides on rounding: it is to find as much in the cache as it did, also where a restart had
    lost it, or where another session had computed a beginning."""
    then = turn.stats.get("reused_tokens")
    if not isinstance(then, int):
        return
    if then < engine.cached_prefix(session_id, turn.prompt_ids):
        engine.release(session_id)
    if then > engine.cached_prefix(session_id, turn.prompt_ids):
        # As long as the prompt, so that the step is one of its kind, but with another end.
        rest = turn.prompt_ids[then:]
        other = tuple((token_id + 1) % engine.capabilities()["vocab_size"] for token_id in rest)
        params = replace(replay_params(engine, turn), temperature=0, max_tokens=1)
        for _ in engine.generate(GenerateRequest((*turn.prompt_ids[:then], *other), params)):
            pass


def _follow(engine: LocalEngine, session_id: str, turn: RecordedTurn) -> None:
    """Have the recorded reply in the session's cache."""
    if turn.reply_ids:
        params = replace(replay_params(engine, turn), stop=(), ignore_eos=True, max_tokens=len(turn.reply_ids))
        for _ in engine.generate(GenerateRequest(turn.prompt_ids, params, session_id, forced_ids=turn.reply_ids)):
            pass


def replay_params(engine: LocalEngine, turn: RecordedTurn) -> SamplingParams:
    """The recorded settings, with as many tokens as were sampled: a reply that does not end there has parted."""
    own = engine.capabilities()["kv_format"]
    params = replace(turn.params, kv_format=None if turn.params.kv_format == own else turn.params.kv_format)
    return params if turn.beams.searches else replace(params, max_tokens=max(turn.generated, 1))


def _run(engine: LocalEngine, session_id: str, turn: RecordedTurn) -> Outcome:
    try:
        _prepare_cache(engine, session_id, turn)
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
