"""Whose fault a loop is: the reply is run again beside its session, from just before the loop, with one thing changed
at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.debugging.causes import cache_findings, precision_findings, sampler_findings
from engine.debugging.loop_case import MOST_DRAWN, RUNS, LoopCase, noticed_after
from engine.debugging.loops import find_loop, word_test
from engine.debugging.protocol import DiagnoseQuery
from engine.debugging.replays import check_room, kept_as
from engine.debugging.verdict import cure, judge, loop_dict
from engine.errors import InvalidRequest, Stopped
from engine.jobs import Slices
from engine.loader import EngineParts
from engine.protocol import Loop
from engine.sampling.params import check_whole
from kernels.kv_format import KV_FORMATS


def audited(
    audit: Callable[..., Mapping[str, Any]] | None, session_id: str, cancelled: Callable[[], bool]
) -> Mapping[str, Any] | None:
    """What an audit of the session's live cache finds; None where there is no such thing, or nothing is cached."""
    try:
        return None if audit is None else audit(session_id, cancelled=cancelled)
    except Stopped:
        raise Stopped("The diagnosis was stopped.") from None


def check_query(query: DiagnoseQuery) -> None:
    """Raises `InvalidRequest`."""
    if query.max_tokens is not None:
        check_whole("max_tokens", query.max_tokens, 1, 2**31 - 1)
    if query.kv_format is not None and query.kv_format not in KV_FORMATS:
        raise InvalidRequest(f"There is no KV format {query.kv_format!r:.40}.")
    if not query.prompt_ids:
        raise InvalidRequest("The prompt of this reply can't be rendered any more.")


def diagnose(parts: EngineParts, query: DiagnoseQuery, audit: Mapping[str, Any] | None) -> Slices[dict[str, Any]]:
    """The body of `POST /api/sessions/{id}/diagnose`. Touches no session.

    Raises `InvalidRequest` if the replays would not fit into what the KV budget has left.
    """
    began = time.perf_counter()
    is_word = word_test(parts.tokenizer.shown_bytes)
    loop = find_loop(query.reply_ids, is_word)
    if loop is None:
        return _report(None, "none", [], None, began)
    history = len(query.prompt_ids) + len(query.reply_ids)
    check_room(parts, max(2 * history, history + RUNS * MOST_DRAWN))
    kept = yield from kept_as(parts, query.kv_format or parts.kv_format)
    noticed = noticed_after(query.reply_ids, loop, is_word)
    case = LoopCase(parts, query, loop, noticed, kept, is_word)
    found = yield from cache_findings(case, audit)
    if judge(found) != "cache":
        found, format_cure = yield from precision_findings(case, found)
        if judge(found) != "precision":
            found, params_cure = yield from sampler_findings(case, found)
            verdict = judge(found)
            return _report(loop, verdict, case.evidence, cure(verdict, params_cure), began)
        return _report(loop, "precision", case.evidence, cure("precision", kv_format=format_cure), began)
    return _report(loop, "cache", case.evidence, cure("cache"), began)


def _report(
    loop: Loop | None, verdict: str, evidence: list[dict[str, Any]], remedy: dict[str, Any] | None, began: float
) -> dict[str, Any]:
    ms = round(1e3 * (time.perf_counter() - began), 1)
    return {"loop": loop_dict(loop), "verdict": verdict, "evidence": evidence, "cure": remedy, "ms": ms}
