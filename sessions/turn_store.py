"""What is kept beside a reply: the numbers of its turn, what was measured of its tokens, what it was made from."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sessions import checks, rows, tree, whole
from sessions.database import SessionDatabase
from sessions.models import Measure, TokenMeasures, TurnInput, TurnRecord


class TurnStore:
    """The part of `SessionStore` that knows turns: `_database` and `_clock` are the store's."""

    _database: SessionDatabase
    _clock: Callable[[], datetime]

    def add_turn(self, session_id: str, message_id: str, model: str, stats: Mapping[str, Any]) -> TurnRecord:
        """Keep the numbers of a finished reply; `stats` is the `kvscope` object of the HTTP contract."""
        turn = TurnRecord(
            id=str(uuid.uuid4()),
            session_id=session_id,
            message_id=message_id,
            model=checks.check_text("The model's name", model, checks.MAX_LABEL),
            stats=checks.parse_json(checks.check_json("stats", stats)),
            created_at=rows.utc(self._clock()),
        )
        with self._database.write() as db:
            tree.find_session(db, session_id)
            tree.find_message(db, message_id, session_id)
            rows.insert_turns(db, [turn])
        return turn

    def turns(self, session_id: str) -> list[TurnRecord]:
        """The numbers of all replies of a session, on every branch, oldest first."""
        with self._database.read() as db:
            tree.find_session(db, session_id)
            return list(whole.turns(db, session_id))

    def turn_lengths(self, limit: int = 10_000) -> list[int]:
        """Prompt and reply tokens of the newest turns of all sessions; turns without sound numbers are left out."""
        with self._database.read() as db:
            return rows.turn_lengths(db, limit)

    def save_measures(self, message_id: str, kv_format: str, measures: Sequence[Measure]) -> None:
        """Keep what was measured of a reply's first tokens, in place of what was there; it goes with the message."""
        kv_format = checks.check_text("The KV format", kv_format, checks.MAX_LABEL)
        packed = rows.pack_measures(measures[: checks.MAX_TOKENS])
        with self._database.write() as db:
            tree.find_message(db, message_id)
            db.execute("INSERT OR REPLACE INTO token_measures VALUES (?, ?, ?)", [message_id, kv_format, packed])

    def measures(self, message_id: str) -> TokenMeasures | None:
        """What is kept of a reply's first tokens; None if nothing is."""
        with self._database.read() as db:
            tree.find_message(db, message_id)
            sql = "SELECT kv_format, data FROM token_measures WHERE message_id = ?"
            found = db.execute(sql, [message_id]).fetchone()
            return None if found is None else TokenMeasures(found[0], rows.unpack_measures(found[1]))

    def save_input(self, item: TurnInput) -> None:
        """Keep what a reply was made from, in place of what was there; it goes with the message."""
        checks.check_token_ids("prompt_ids", item.prompt_ids)
        with self._database.write() as db:
            tree.find_message(db, item.message_id)
            rows.insert_inputs(db, [item])
