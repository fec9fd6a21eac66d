"""Time to first token by where the cache of a session is: nowhere, a shared prefix, the pool, RAM, disk."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.cache.setting import Setting, first_token_ms, running, scratch, text_ids, turn
from benchmarks.common import median, print_table, spread
from engine.local import LocalEngine
from engine.memory.plan import kv_bytes
from engine.protocol import ChatMessage, TurnStats

NEW_TOKENS = 12
"""Of the next message."""


def measure(setting: Setting) -> dict[str, Any]:
    """Each place in turn, `rounds` times; the session's next message is the same everywhere."""
    found: dict[str, list[TurnStats]] = {}
    for _ in range(setting.rounds):
        with scratch() as folder:
            for place, stats in _one_round(setting, folder).items():
                found.setdefault(place, []).append(stats)
    times = {place: [first_token_ms(stats) for stats in many] for place, many in found.items()}
    rows = []
    for place, many in found.items():
        whole = times["prefix cold" if place.startswith("prefix") else "cold"]
        reused = f"{many[0].reused_tokens} of {many[0].prompt_tokens}"
        ratio = f"{median(whole) / median(times[place]):.1f} x"
        rows.append((place, reused, f"{median(times[place]):.0f}", spread(times[place]), ratio))
    print_table(("first token from", "tokens reused", "ms", "spread", "sooner by"), rows)
    return {
        place: {"ms": median(times[place]), "reused_tokens": many[0].reused_tokens} for place, many in found.items()
    }


def _one_round(setting: Setting, folder: Path) -> dict[str, TurnStats]:
    session, found = str(uuid.uuid4()), {}
    with running(setting, folder) as engine:
        ids = text_ids(engine, setting.text, setting.session_tokens + 2 * NEW_TOKENS)
        history, again, later = (ids[: setting.session_tokens + count] for count in (0, NEW_TOKENS, 2 * NEW_TOKENS))
        found["cold"] = turn(engine, history, session)
        found["pool"] = turn(engine, again, session)
        per_token = engine.capabilities()["bytes_per_token"]
    with running(setting, folder) as engine:
        found["disk"] = turn(engine, later, session)
    with scratch() as other:
        # The pool holds one session, so the second one pushes the first out into RAM.
        room = kv_bytes(setting.session_tokens + 8 * NEW_TOKENS, per_token, 16)
        options = {"kv_budget": room, "ram_limit": room, "snapshot_limit": 0}
        with running(setting, other, **options) as engine:
            turn(engine, history, session)
            turn(engine, text_ids(engine, setting.text, setting.session_tokens, skip=5), str(uuid.uuid4()))
            found["RAM"] = turn(engine, later, session)
    return found | _prefix(setting, folder)


def _prefix(setting: Setting, folder: Path) -> dict[str, TurnStats]:
    """A chat whose system prompt nobody has run, one after another chat with it, one with it frozen on disk."""
    found = {}
    with running(setting, folder, snapshot_limit=0) as engine:
        system, render = _system_prompt(engine, setting)
        found["prefix cold"] = turn(engine, render("Who wrote this?"))
        found["prefix shared"] = turn(engine, render("Which part is the longest?"))
        engine.freeze(system)
    with running(setting, folder, snapshot_limit=0) as engine:
        found["prefix frozen"] = turn(engine, _system_prompt(engine, setting)[1]("Which part is the longest?"))
    return found


def _system_prompt(engine: LocalEngine, setting: Setting) -> tuple[str, Callable[[str], tuple[int, ...]]]:
    """A system prompt of about `prefix_tokens`, and how to render a question after it."""
    system = engine.tokenizer.decode(text_ids(engine, setting.text, setting.prefix_tokens, skip=11))

    def render(question: str) -> tuple[int, ...]:
        messages = [ChatMessage("system", system), ChatMessage("user", question)]
        return engine.tokenizer.render(messages, datetime.now(UTC)).token_ids

    return system, render
