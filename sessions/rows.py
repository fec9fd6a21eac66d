"""Between table rows and the stored types, and the columns they are written to."""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlite_utils import Database

from sessions.checks import check_json, parse_json
from sessions.models import Measure, Message, Session, TurnInput, TurnRecord

Row = Mapping[str, Any]
MOST = 2**53
"""Counts beyond it are no counts."""


def pack_ids(token_ids: Sequence[int] | None) -> bytes | None:
    """Token ids as little-endian int32: a quarter of JSON's size and exact."""
    if token_ids is None:
        return None
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(blob: bytes | None) -> tuple[int, ...] | None:
    """The ids that `pack_ids` packed."""
    if blob is None:
        return None
    packed = array("i")
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


_MEASURE = struct.Struct("<fiff")


def pack_measures(measures: Sequence[Measure]) -> bytes:
    """16 bytes per token: float32 but for the rank, an int32; little-endian."""
    return b"".join(_MEASURE.pack(*item) for item in measures)


def unpack_measures(blob: bytes) -> tuple[Measure, ...]:
    """What `pack_measures` packed, in float32."""
    return tuple(_MEASURE.iter_unpack(blob))


def session_from(row: Row) -> Session:
    return Session(
        id=row["id"],
        title=row["title"],
        system_prompt=row["system_prompt"],
        params=parse_json(row["params"]),
        head_id=row["head_id"],
        first_kept_id=row["first_kept_id"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        prompt_date=row["prompt_date"],
    )


def message_from(row: Row) -> Message:
    return Message(
        id=row["id"],
        session_id=row["session_id"],
        parent_id=row["parent_id"],
        role=row["role"],
        content=row["content"],
        token_ids=unpack_ids(row["token_ids"]),
        status=row["status"],
        finish_reason=row["finish_reason"],
        error=row["error"],
        params=parse_json(row["params"]),
        model=row["model"],
        created_at=row["created_at"],
    )


def turn_from(row: Row) -> TurnRecord:
    return TurnRecord(
        id=row["id"],
        session_id=row["session_id"],
        message_id=row["message_id"],
        model=row["model"],
        stats=parse_json(row["stats"]),
        created_at=row["created_at"],
    )


def input_from(row: Row) -> TurnInput:
    return TurnInput(
        message_id=row["message_id"],
        prompt_ids=unpack_ids(zlib.decompress(row["prompt_ids"])) or (),
        kv_format=row["kv_format"],
        beams=parse_json(row["beams"]),
        fingerprint=parse_json(row["fingerprint"]),
    )


def insert_session(db: Database, session: Session) -> None:
    """Store a new session, its head and first kept message left out: their rows do not exist yet."""
    db.table("sessions").insert(
        {
            "id": session.id,
            "title": session.title,
            "system_prompt": session.system_prompt,
            "params": check_json("params", session.params),
            "created_at": session.created_at,
            "updated_at": session.updated_at,
            "prompt_date": session.prompt_date,
        }
    )


def insert_messages(db: Database, messages: Sequence[Message]) -> None:
    """Store new messages in this order, which must name parents before children."""
    db.table("messages").insert_all(
        {
            "id": message.id,
            "session_id": message.session_id,
            "parent_id": message.parent_id,
            "role": message.role,
            "content": message.content,
            "token_ids": pack_ids(message.token_ids),
            "status": message.status,
            "finish_reason": message.finish_reason,
            "error": message.error,
            "params": check_json("params", message.params),
            "model": message.model,
            "created_at": message.created_at,
        }
        for message in messages
    )


def insert_turns(db: Database, turns: Sequence[TurnRecord]) -> None:
    db.table("turns").insert_all(
        {
            "id": turn.id,
            "session_id": turn.session_id,
            "message_id": turn.message_id,
            "model": turn.model,
            "stats": check_json("stats", turn.stats),
            "created_at": turn.created_at,
        }
        for turn in turns
    )


def insert_inputs(db: Database, inputs: Sequence[TurnInput]) -> None:
    """Store what replies were made from, in place of what was there."""
    db.table("turn_inputs").insert_all(
        (
            {
                "message_id": item.message_id,
                "prompt_ids": zlib.compress(pack_ids(item.prompt_ids) or b""),
                "kv_format": item.kv_format,
                "beams": check_json("beams", item.beams),
                "fingerprint": check_json("fingerprint", item.fingerprint),
            }
            for item in inputs
        ),
        replace=True,
    )


def turn_lengths(db: Database, limit: int) -> list[int]:
    """Prompt and generated tokens together, of the newest turns whose numbers are whole ones."""
    prompt, generated = "json_extract(stats, '$.prompt_tokens')", "json_extract(stats, '$.generated_tokens')"
    sound = " AND ".join(
        f"typeof({value}) = 'integer' AND {value} BETWEEN 0 AND {MOST}" for value in (prompt, generated)
    )
    sql = f"SELECT {prompt} + {generated} FROM turns WHERE {sound} ORDER BY seq DESC LIMIT ?"
    return [row[0] for row in db.execute(sql, [limit]).fetchall()]


def update(db: Database, table: str, item_id: str, values: Mapping[str, Any]) -> None:
    if values:
        columns = ", ".join(f"{name} = ?" for name in values)
        db.execute(f"UPDATE {table} SET {columns} WHERE id = ?", [*values.values(), item_id])


def utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
