"""Checks and samples that the tests of stored sessions share."""

from __future__ import annotations

from sessions.models import FAILED, PARTIAL, Session, TurnInput
from sessions.store import SessionStore


def check_integrity(store: SessionStore) -> None:
    """SQLite's own checks, the search index against the text, and the store's promise that parents come first."""
    with store._database.read() as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        pairs = "SELECT count(*) FROM messages m JOIN messages p ON m.parent_id = p.id"
        wrong = f"{pairs} WHERE p.seq >= m.seq OR p.session_id <> m.session_id"
        assert db.execute(wrong).fetchone() == (0,)
    with store._database.write() as db:
        # Rank 1 compares index and text; replies that are still being written are left out of the index on purpose.
        rank = int(db.execute("SELECT count(*) FROM messages WHERE status = 'partial'").fetchone() == (0,))
        db.execute("INSERT INTO messages_fts(messages_fts, rank) VALUES ('integrity-check', ?)", [rank])
        db.execute("INSERT INTO sessions_fts(sessions_fts, rank) VALUES ('integrity-check', 1)")


def sample_session(store: SessionStore) -> Session:
    """Two questions, the first answered twice, the second edited, one failed reply, token ids, settings and numbers,
    and what both answers were made from."""
    session = store.create("Trees & <b>leaves</b>", "Be brief.", {"temperature": 0.5, "stop": ["\n\n"], "seed": 7})
    first = store.add_message(session.id, None, "user", "世界 é 👩‍👩‍👧‍👦?")
    worse = store.add_message(session.id, first.id, "assistant", "Yes", token_ids=[1, 2, 2**31 - 1], model="tiny")
    better = store.add_message(session.id, first.id, "assistant", "", status=PARTIAL, params={"seed": 8}, model="tiny")
    store.update_message(better.id, content="Yes!", token_ids=[], status="complete", finish_reason="stop")
    second = store.add_message(session.id, better.id, "user", "and\0then \ud800?")
    failed = store.add_message(session.id, second.id, "assistant", "Well")
    store.update_message(failed.id, status=FAILED, error="The values were not finite.")
    store.add_message(session.id, better.id, "user", "Really?")
    for message in (worse, better):
        store.add_turn(session.id, message.id, "tiny", {"session_id": session.id, "ttft_ms": 12.5, "miss": None})
    for message, prompt in ((worse, (5, 6, 7)), (better, (5, 6, 8, 9))):
        store.save_input(TurnInput(message.id, prompt, "fp16", {}, {"weights": "abc"}))
    return store.update(session.id, head_id=failed.id, first_kept_id=second.id)
