"""Session files as recorded traffic: each finished reply with its prompt, settings, seed, ids and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.errors import KVScopeError
from engine.sampling.beam import BeamParams
from engine.sampling.params import MAX_TOKENS, SamplingParams
from sessions.errors import InvalidData
from sessions.export import SessionTree, from_json
from sessions.models import COMPLETE, INTERRUPTED, Message, TurnInput
from ui.api.params import parse_params

BEAM_SETTINGS = tuple(field.name for field in fields(BeamParams))
MODEL_KEYS = ("weights", "tokenizer")
"""Where these differ ids mean something else, and nothing can be replayed."""


class BadFile(Exception):
    """One sentence about a file that can't be replayed."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """`number` counts the file's turns from 1; `asked` is in seconds since 1970.

    `params` has the seed and the KV format; `default_format`: nobody had asked for that format. `generated` are the
    tokens that were sampled: the reply's, and what ended it. `skipped` says why the turn can't be made again, None
    where it can.
    """

    number: int
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    params: SamplingParams
    beams: BeamParams
    default_format: bool
    fingerprint: dict[str, Any]
    model: str
    generated: int
    stats: dict[str, Any]
    asked: float
    skipped: str | None


@dataclass(frozen=True, slots=True)
class RecordedSession:
    name: str
    turns: tuple[RecordedTurn, ...]

    def fitting(self, fingerprint: Callable[[str], Mapping[str, str]], vocab_size: int) -> RecordedSession:
        """With turns of other weights, or of another tokenizer, marked as skipped; `fingerprint` is that of what runs
        now, by KV format. Raises `BadFile` if none is left, or if one has ids that the model does not have."""
        turns = [
            turn if turn.skipped or fits(turn, fingerprint) else replace(turn, skipped="another model made it")
            for turn in self.turns
        ]
        if all(turn.skipped for turn in turns):
            made_by = self.usable[0].model
            raise BadFile(f"{self.name} was recorded with other weights ({made_by}); name them with --model.")
        for turn in turns:
            if turn.skipped is None and max((*turn.prompt_ids, *turn.reply_ids)) >= vocab_size:
                raise BadFile(f"{self.name}: turn {turn.number} has token ids that the model does not have.")
        return replace(self, turns=tuple(turns))

    @property
    def typical(self) -> RecordedTurn:
        """A usable turn, in the format that the engine kept by default if there is one."""
        return next((turn for turn in self.usable if turn.default_format), self.usable[0])

    @property
    def usable(self) -> tuple[RecordedTurn, ...]:
        return tuple(turn for turn in self.turns if turn.skipped is None)


def read_session(path: Path) -> RecordedSession:
    """What an exported file says of its turns, in the order in which they were asked for. Raises `BadFile`."""
    name = path.name
    try:
        tree = from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise BadFile(f"{name} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{name} is not JSON.") from error
    except InvalidData as error:
        raise BadFile(f"{name}: {error}") from error
    if not tree.inputs:
        raise BadFile(
            f"{name} does not say what its replies were made from: it was exported by a KVScope that did not keep that."
        )
    session = RecordedSession(name, _turns(name, tree))
    if not session.usable:
        raise BadFile(f"{name} holds no finished reply that could be made again.")
    return session


def fits(turn: RecordedTurn, fingerprint: Callable[[str], Mapping[str, str]]) -> bool:
    now = fingerprint(turn.params.kv_format or "")
    return all(turn.fingerprint.get(key) == now.get(key) for key in MODEL_KEYS)


def differences(turn: RecordedTurn, fingerprint: Callable[[str], Mapping[str, str]]) -> list[str]:
    """What else was different when a turn was recorded, by name."""
    now = fingerprint(turn.params.kv_format or "")
    compared = now if turn.default_format else now.keys() - {"KV format"}
    return [key for key in compared if turn.fingerprint.get(key) != now[key]]


def _turns(name: str, tree: SessionTree) -> tuple[RecordedTurn, ...]:
    messages = {message.id: message for message in tree.messages}
    stats = {turn.message_id: turn.stats for turn in tree.turns}
    turns = []
    for number, item in enumerate(tree.inputs, start=1):
        try:
            turns.append(_turn(number, item, messages[item.message_id], stats.get(item.message_id, {})))
        except KVScopeError as error:
            raise BadFile(f"{name}: turn {number} has settings that make no sense. {error}") from error
    return tuple(turns)


def _turn(number: int, item: TurnInput, message: Message, stats: dict[str, Any]) -> RecordedTurn:
    reply_ids = message.token_ids or ()
    generated = stats.get("generated_tokens")
    if type(generated) is not int or not 0 < generated <= MAX_TOKENS:
        generated = len(reply_ids) + 1
    params = replace(parse_params(message.params), kv_format=item.kv_format)
    beams = BeamParams(**{name: item.beams[name] for name in BEAM_SETTINGS if name in item.beams})
    return RecordedTurn(
        number=number,
        prompt_ids=item.prompt_ids,
        reply_ids=reply_ids,
        params=params,
        beams=beams,
        default_format=message.params.get("kv_format") is None,
        fingerprint=item.fingerprint,
        model=message.model or "",
        generated=generated,
        stats=stats,
        asked=datetime.fromisoformat(message.created_at).timestamp(),
        skipped=_why_skipped(item, message, params, beams),
    )


def _why_skipped(item: TurnInput, message: Message, params: SamplingParams, beams: BeamParams) -> str | None:
    if message.status != COMPLETE or message.finish_reason in (None, "error", INTERRUPTED):
        return "it did not finish"
    if not item.prompt_ids or message.token_ids is None:
        return "its ids are not known"
    if message.finish_reason == "cancelled" and (beams.searches or not message.token_ids):
        return "it was stopped by hand before it had an outcome"
    if params.temperature > 0 and params.seed is None and not beams.searches:
        return "its seed is not known"
    return None
