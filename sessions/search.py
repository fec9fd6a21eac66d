"""The session list and its search. What a person types is always text to find, never a query language."""

from __future__ import annotations

import re
from typing import Any

from sqlite_utils import Database

from sessions.checks import check_text
from sessions.models import SessionSummary

MAX_QUERY = 400
MAX_TERMS = 16
TRIGRAM = 3
SNIPPET_BEFORE = 30
SNIPPET_LENGTH = 120

_SUMMARY = """
SELECT s.id, s.title, s.updated_at, (SELECT count(*) FROM messages WHERE session_id = s.id) AS message_count
"""
_ORDER = " ORDER BY s.updated_at DESC, s.seq DESC LIMIT ?"


def split_query(query: str) -> tuple[str, ...]:
    """The words to find, all of which must occur. Length and number are bounded; what goes beyond is ignored."""
    cleaned = check_text("The search text", query[:MAX_QUERY]).replace("\0", " ")
    return tuple(dict.fromkeys(cleaned.split()))[:MAX_TERMS]


def list_sessions(db: Database, query: str, limit: int) -> list[SessionSummary]:
    """Sessions whose title, or one of whose messages, holds every word of `query`; all for a blank query.

    Newest change first. The snippet is from the newest message that matches, "" where only the title does.
    """
    terms = split_query(query)
    if not terms:
        rows = list(db.query(f"{_SUMMARY} FROM sessions s {_ORDER}", [limit]))
        return [_summary(row, "") for row in rows]
    in_messages, message_values = _condition("messages", "content", terms)
    in_titles, title_values = _condition("sessions", "title", terms)
    sql = f"""
        WITH hits AS (SELECT session_id, max(seq) AS seq FROM messages WHERE {in_messages} GROUP BY session_id),
             titled AS (SELECT seq FROM sessions WHERE {in_titles})
        {_SUMMARY}, hit.content FROM sessions s
        LEFT JOIN hits ON hits.session_id = s.id LEFT JOIN messages hit ON hit.seq = hits.seq
        WHERE hits.seq IS NOT NULL OR s.seq IN (SELECT seq FROM titled) {_ORDER}
    """
    rows = list(db.query(sql, [*message_values, *title_values, limit]))
    return [_summary(row, snippet(row["content"] or "", terms)) for row in rows]


def snippet(text: str, terms: tuple[str, ...]) -> str:
    """One line of the text around the first place where one of the terms occurs."""
    found = re.search("|".join(re.escape(term) for term in terms), text, re.IGNORECASE)
    start = max(0, found.start() - SNIPPET_BEFORE) if found else 0
    end = start + SNIPPET_LENGTH
    line = " ".join(text[start:end].split())
    return ("…" if start > 0 else "") + line + ("…" if end < len(text) else "")


def _condition(table: str, column: str, terms: tuple[str, ...]) -> tuple[str, list[str]]:
    """SQL that holds where `column` contains all terms, and its values."""
    conditions, values = [], []
    long_terms = [term for term in terms if len(term) >= TRIGRAM]
    if long_terms:
        conditions.append(f"seq IN (SELECT rowid FROM {table}_fts WHERE {table}_fts MATCH ?)")
        values.append(" AND ".join('"' + term.replace('"', '""') + '"' for term in long_terms))
    for term in terms:
        # The index holds no strings this short, but "我们" and "C#" are words too.
        if len(term) < TRIGRAM:
            conditions.append(f"{column} LIKE ? ESCAPE '\\'")
            values.append("%" + re.sub(r"([\\%_])", r"\\\1", term) + "%")
    return " AND ".join(conditions), values


def _summary(row: dict[str, Any], text: str) -> SessionSummary:
    return SessionSummary(row["id"], row["title"], row["updated_at"], row["message_count"], text)
