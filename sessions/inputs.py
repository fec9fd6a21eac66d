"""What replies were made from, in an export: each prompt as what it adds to the one before, so that a file grows with
the chat and not with its square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sessions import checks
from sessions.errors import InvalidData
from sessions.json_record import JsonRecord
from sessions.models import TurnInput

MAX_UNFOLDED = 16_000_000
"""Ids of all prompts together; a short file can stand for long ones."""


def plain_inputs(inputs: Sequence[TurnInput]) -> list[dict[str, Any]]:
    """`{message_id, kept, prompt_ids, kv_format, beams, fingerprint}` each: a prompt is the first `kept` ids of the one
    before and then `prompt_ids`."""
    found: list[dict[str, Any]] = []
    before: tuple[int, ...] = ()
    for item in inputs:
        kept = _common(before, item.prompt_ids)
        found.append(
            {
                "message_id": item.message_id,
                "kept": kept,
                "prompt_ids": list(item.prompt_ids[kept:]),
                "kv_format": item.kv_format,
                "beams": item.beams,
                "fingerprint": item.fingerprint,
            }
        )
        before = item.prompt_ids
    return found


def inputs_from(records: Sequence[JsonRecord], known: set[str]) -> tuple[TurnInput, ...]:
    """What `plain_inputs` wrote; `known` are the ids of the file's messages. Raises `InvalidData`.

    What goes beyond `MAX_UNFOLDED` is left out: the chat itself goes on without it.
    """
    found: list[TurnInput] = []
    total = 0
    for record in records:
        before = found[-1].prompt_ids if found else ()
        message_id = record.uuid("message_id")
        if message_id not in known:
            raise InvalidData(f"{record.name} names a message that is not in the file.")
        prompt_ids = (*before[: record.whole("kept", len(before))], *(record.token_ids("prompt_ids") or ()))
        total += len(prompt_ids)
        if total > MAX_UNFOLDED:
            break
        item = TurnInput(
            message_id=message_id,
            prompt_ids=prompt_ids,
            kv_format=record.text("kv_format", checks.MAX_LABEL),
            beams=record.object("beams"),
            fingerprint=record.object("fingerprint"),
        )
        found.append(item)
    return tuple(found)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
