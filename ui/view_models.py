"""What the page shows, as plain JSON values computed from stored and measured data. Pure functions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.sampling.params import SamplingParams
from sessions.models import PARTIAL, Branch, Message, Session, SessionSummary
from ui.reply_html import reply_html

SHOWN_STATS = ("generated_tokens", "decode_tokens_per_s", "ttft_ms", "reused_tokens", "computed_tokens")
SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "seed",
    "stop",
    "kv_format",
    "strip_thoughts",
)
"""Sampling settings that the page offers, in the order of its controls."""
COUNTS = ("cache_pos", "prompt_tokens", "reused_tokens", "computed_tokens", "generated_tokens")
DRAFTS = ("drafted_tokens", "accepted_tokens")
"""Counts that turns of earlier versions lack."""
RATES = ("ttft_ms", "prefill_ms", "decode_tokens_per_s")
MISS_COUNTS = ("position", "tokens_lost")
MISS_TOKENS = ("cached_token", "wanted_token")
MOST = 2**53
"""A browser's whole numbers end here."""
SHOWN_CHECKPOINTS = 4
AUDITED = ("verdict", "scope", "at", "sentence", "checked_tokens", "cache_pos", "heat", "ms")
FAULT = ("kind", "tensor", "layers", "first_position", "last_position", "amount")
LOOP_COUNTS = ("period", "start", "repeats")


def signature(value: object) -> str:
    """A short name for a JSON value: equal values, equal names."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


def sound_stats(stats: Mapping[str, Any]) -> bool:
    """Whether stored numbers of a turn can be shown. An imported chat may have any JSON values in their place."""
    miss = stats.get("miss")
    return (
        all(_is_count(stats.get(name)) for name in COUNTS)
        and all(_is_count(stats.get(name, 0)) for name in DRAFTS)
        and all(_is_rate(stats.get(name)) for name in RATES)
        and type(stats.get("seed")) is int
        and isinstance(stats.get("finish_reason"), str | None)
        and (miss is None or (isinstance(miss, Mapping) and _is_sound_miss(miss)))
    )


def _is_sound_miss(miss: Mapping[str, Any]) -> bool:
    tokens = [miss[name] for name in MISS_TOKENS if miss.get(name) is not None]
    return isinstance(miss.get("cause"), str) and all(map(_is_count, [*map(miss.get, MISS_COUNTS), *tokens]))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _is_rate(value: object) -> bool:
    return value is None or _is_count(value) or (isinstance(value, float) and 0 <= value <= MOST)


def message_entries(
    branch: Branch, stats: Mapping[str, Mapping[str, Any]], live_id: str | None
) -> list[dict[str, Any]]:
    """One entry per message of the branch; the reply that is being written (`live_id`) has no text here."""
    return [_entry(message, branch.siblings, stats.get(message.id), live_id) for message in branch.messages]


def _entry(
    message: Message,
    siblings: Mapping[str, tuple[str, ...]],
    stats: Mapping[str, Any] | None,
    live_id: str | None,
) -> dict[str, Any]:
    versions = siblings.get(message.id, (message.id,))
    place = versions.index(message.id)
    entry: dict[str, Any] = {"id": message.id, "role": message.role, "version": place + 1, "versions": len(versions)}
    if place > 0:
        entry["previous"] = versions[place - 1]
    if place + 1 < len(versions):
        entry["next"] = versions[place + 1]
    if message.id == live_id:
        return entry | {"live": True}
    if message.role == "assistant":
        entry["html"] = reply_html(message.content)
    else:
        entry["text"] = message.content
    if message.status == PARTIAL:
        entry["partial"] = True
    if message.error:
        entry["error"] = message.error
    if message.finish_reason not in (None, "stop"):
        entry["finish"] = message.finish_reason
    if stats and sound_stats(stats):
        entry["stats"] = {name: stats.get(name) for name in SHOWN_STATS}
    loop = (stats or {}).get("loop")
    if isinstance(loop, Mapping) and all(_is_count(loop.get(name)) for name in LOOP_COUNTS):
        entry["loop"] = {name: loop[name] for name in LOOP_COUNTS} | {"near": bool(loop.get("near"))}
    return entry


def session_part(session: Session) -> dict[str, Any]:
    """Title and settings of the open session."""
    return {
        "id": session.id,
        "title": session.title,
        "system_prompt": session.system_prompt,
        "settings": settings(session.params),
        "first_kept": session.first_kept_id,
    }


def settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings, filled up with the defaults."""
    defaults = asdict(SamplingParams())
    values = {name: defaults[name] if params.get(name) is None else params[name] for name in SETTINGS}
    if values["max_tokens"] is None and params.get("max_completion_tokens") is not None:
        values["max_tokens"] = params["max_completion_tokens"]
    stop = values["stop"] or []
    return values | {"stop": [stop] if isinstance(stop, str) else list(stop)}


def list_part(summaries: Sequence[SessionSummary]) -> list[dict[str, Any]]:
    """The lines of the session list, newest first."""
    return [
        {"id": item.id, "title": item.title, "at": item.updated_at, "count": item.message_count, "hit": item.snippet}
        for item in summaries
    ]


def model_section(capabilities: Mapping[str, Any]) -> dict[str, Any]:
    """The model's facts and how its price per token comes about."""
    names = ("model", "device", "dtype", "kv_format", "max_seq_len", "block_size", "num_layers", "num_kv_heads",
             "head_dim", "bytes_per_token", "state_layers", "state_bytes", "chat_template", "speculation")  # fmt: skip
    section = {name: capabilities.get(name) for name in names}
    section["kv_formats"] = list(capabilities.get("kv_formats", ()))
    section["chat_templates"] = list(capabilities.get("chat_templates", ()))
    section["warnings"] = list(capabilities.get("warnings", ()))
    values = 2 * math.prod(int(section[name] or 0) for name in ("num_layers", "num_kv_heads", "head_dim"))
    # A format with scales has no whole number of bytes a value.
    if values and (section["bytes_per_token"] or 0) % values == 0:
        section["formula"] = (
            f"2 × {section['num_layers']} layers × {section['num_kv_heads']} KV heads"
            f" × {section['head_dim']} × {section['bytes_per_token'] // values} B"
        )
    return section


def turn_section(
    stats: Mapping[str, Any] | None, running: bool, max_new_tokens: int | None, token_text: Callable[[int], str]
) -> dict[str, Any] | None:
    """The numbers of the running or the last turn; tokens of a miss with their text."""
    if stats is None:
        return None
    section = {name: value for name, value in stats.items() if name != "session_id"}
    section["running"] = running
    section["max_new_tokens"] = max_new_tokens
    if stats.get("miss"):
        miss = dict(stats["miss"])
        for name in ("cached", "wanted"):
            token_id = miss.get(f"{name}_token")
            miss[f"{name}_token"] = token_id
            miss[f"{name}_text"] = None if token_id is None else token_text(token_id)
        section["miss"] = miss
    return section


def cache_section(report: Mapping[str, Any]) -> dict[str, Any]:
    """How much is held, whether the invariants hold, and of a recurrent state its size and its last checkpoints."""
    names = ("cache_pos", "bytes_used", "bytes_reserved", "kv_ratio", "status", "invariants", "violation", "away",
             "refused")  # fmt: skip
    section = {name: report[name] for name in names}
    state = report.get("state")
    if state is not None:
        positions = state["checkpoints"]
        section["state"] = {"bytes": state["bytes"], "count": len(positions), "last": positions[-SHOWN_CHECKPOINTS:]}
    return section


def audit_section(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The session's last audit, its heat map included; None if there was none since the cache was changed."""
    if found is None:
        return None
    section = {name: found[name] for name in AUDITED}
    section["noise_floor"], section["max_error"] = _finite(found["noise_floor"]), _finite(found["max_error"])
    section["faults"] = [
        {name: fault[name] for name in FAULT} | {"max_error": _finite(fault["max_error"])} for fault in found["faults"]
    ]
    return section | {"follows": len(found["follows"])}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def block_cells(blocks: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """`[id, start, count, owners, verdict of the last audit, tier]` of each block of the table.

    Those outside the pool have no id. The verdict is "clean", "fault", or None where nothing of the block was looked at
    since it was written.
    """
    return [
        [
            block["id"],
            block["start"],
            block["count"],
            block["ref_count"],
            (block["last_audit"] or {}).get("verdict"),
            block["tier"],
        ]
        for block in blocks
    ]


def probe_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """`[position, token id, token text, norm, values...]`, rounded to what is shown."""
    return [
        [row["position"], row["token_id"], row["token"], row["norm"] and round(row["norm"], 2)]
        + [round(value, 3) for value in row["values"]]
        for row in rows
    ]


def changed_sections(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of `new` that differ from `old`; lists as `{keep, add}`: keep that many items, then append."""
    changes: dict[str, Any] = {}
    for name, value in new.items():
        before = old.get(name)
        if name in old and before == value:
            continue
        if isinstance(value, list):
            keep = 0
            for left, right in zip(before or (), value, strict=False):
                if left != right:
                    break
                keep += 1
            changes[name] = {"keep": keep, "add": value[keep:]}
        else:
            changes[name] = value
    return changes
