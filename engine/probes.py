"""Looks into one session's cache, for panel and inspection routes. Runs on the engine thread, changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from math import isfinite, nan
from typing import Any

from engine.debugging.invariants import invariants
from engine.debugging.protocol import ProbeQuery
from engine.debugging.records import block_contents
from engine.errors import InvalidRequest
from engine.kv_cache.block_pool import NULL_BLOCK
from engine.kv_cache.spec import KVCacheSpec
from engine.kv_cache.window import BlockPlace
from engine.loader import EngineParts
from engine.memory.ledger import used_bytes
from engine.sequence import Sequence
from engine.step_loop import StepLoop
from engine.tiers.snapshots import Snapshots

MAX_PROBE_POSITIONS = 4096
RATIO_TOKENS = 16
PROBE_DIMS = 10


def cache_report(loop: StepLoop, session_id: str) -> dict[str, Any]:
    """The body of `GET /api/sessions/{id}/cache`; an unknown session simply has an empty cache."""
    sequence, parts = loop.scheduler.find(session_id) or Sequence(loop.prefix_cache, session_id), loop.parts
    spec = parts.cache.spec
    state = _state(parts, sequence)
    state_bytes = state["bytes"] if state else 0
    held = loop.keeper.ram.find(session_id)
    ratio, violation = kv_ratio(loop, parts, sequence), loop.lights.first(session_id)
    blocks = _blocks(loop, parts, sequence)
    if held is not None:
        turns = _turns_by_index(held.places, held.turns)
        blocks = _kept("ram", held.cache_pos, spec.block_size, parts.kv_format, turns)
    return {
        "session_id": session_id,
        "model": parts.name,
        "kv_format": parts.kv_format,
        "cache_pos": sequence.cache_pos,
        "max_seq_len": parts.max_seq_len,
        "status": sequence.status.value,
        "token_ids": sequence.token_ids[: sequence.cache_pos],
        "block_size": spec.block_size,
        "block_table": list(sequence.block_table),
        "blocks": blocks,
        "beams": loop.turns.beams(session_id),
        "refused": None,
        "away": None if held is None else {"tier": "ram", "tokens": held.cache_pos},
        "bytes_per_token": spec.bytes_per_token,
        "bytes_used": used_bytes(sequence, spec) + state_bytes,
        "bytes_reserved": sequence.blocks.count * spec.block_bytes + state_bytes,
        "groups": _groups(parts, sequence),
        "state": state,
        "kv_ratio": ratio,
        "invariants": invariants(loop.prefix_cache, loop.lights, sequence, ratio is None or isfinite(ratio)),
        "violation": violation.sentence if violation is not None else None,
        "audit": loop.records.last_audit(session_id),
    }


def kv_ratio(loop: StepLoop, parts: EngineParts, sequence: Sequence) -> float | None:
    """max |K| / max |V| over the newest `RATIO_TOKENS` tokens, all layers and heads; None while nothing is cached, NaN
    where a value is not finite.

    Where it is large, a format with one scale for both, or few bits at all, costs more.
    """
    windows = [group.window for group in parts.cache.spec.groups if group.window is not None]
    count = min([sequence.cache_pos, RATIO_TOKENS, *windows])
    if not count or not parts.cache.spec.num_layers:
        return None
    loop.runner.sync_blocks()
    both = parts.cache.read_tokens(sequence.block_tables, sequence.cache_pos - count, count)
    keys, values = both.abs().amax((1, 2, 3, 4)).tolist()
    if not isfinite(keys) or not isfinite(values):
        return nan
    return round(keys / values, 3) if values else None


def _state(parts: EngineParts, sequence: Sequence) -> dict[str, Any] | None:
    """The recurrent state at `cache_pos` (constant in size; 0 bytes while there is none) and the positions to which the
    sequence can go back; None for models without such layers."""
    state = sequence.state
    if state is None or parts.states is None:
        return None
    slot = state.live if state.live is not None else state.held and state.held.slot
    return {
        "layers": parts.states.spec.num_layers,
        "bytes": 0 if slot is None else parts.states.spec.nbytes,
        "slot": slot,
        "checkpoints": state.checkpoints(sequence.token_ids[: sequence.cache_pos]),
    }


def _groups(parts: EngineParts, sequence: Sequence) -> list[dict[str, Any]]:
    """Of each group of layers what it sees and what it holds of the sequence."""
    spec = parts.cache.spec
    return [
        {
            "window": group.window,
            "sinks": group.sinks,
            "layers": [layer for layer, place in enumerate(spec.places) if place.group == index],
            "held_tokens": sequence.blocks.held_tokens(index, sequence.cache_pos),
            "bytes": sum(block_id != NULL_BLOCK for block_id in table) * spec.block_bytes,
            "block_table": list(table),
        }
        for index, (group, table) in enumerate(zip(spec.groups, sequence.block_tables, strict=False))
    ]


def _blocks(loop: StepLoop, parts: EngineParts, sequence: Sequence) -> list[dict[str, Any]]:
    size = parts.cache.spec.block_size
    pool = loop.prefix_cache.pool
    tier = "gpu" if parts.model.device.type == "cuda" else "ram"
    blocks = []
    contents = block_contents(sequence)
    for index, block_id in enumerate(sequence.block_table):
        if block_id == NULL_BLOCK:
            continue
        start = index * size
        in_tree = index < sequence.tree_blocks
        blocks.append(
            {
                "id": block_id,
                "start": start,
                "count": max(0, min(size, sequence.cache_pos - start)),
                # The tree's own reference is not an owner: it only remembers the block.
                "ref_count": pool.ref_count(block_id) - in_tree,
                "tier": tier,
                "format": parts.kv_format,
                "written_by_turn": sequence.block_turns[index],
                "last_audit": loop.records.block_audit(sequence.session_id or "", index, contents[index]),
            }
        )
    return blocks


def with_disk(report: dict[str, Any], snapshots: Snapshots, session_id: str) -> dict[str, Any]:
    """The same, with what is on disk of a session that has nothing in the pool or in RAM, and why it is not used."""
    report = {**report, "refused": snapshots.refusal(session_id)}
    here = report["cache_pos"] or report["blocks"] or report["away"]
    manifest = snapshots.manifest(session_id) if not here and report["status"] == "idle" else None
    if manifest is None or report["refused"] is not None:
        return report
    turns = _turns_by_index(manifest.places, [block.turn for block in manifest.blocks])
    kv_format = snapshots.kv_format(session_id) or report["kv_format"]
    report["blocks"] = _kept("disk", manifest.cache_pos, manifest.block_size, kv_format, turns)
    report["away"] = {"tier": "disk", "tokens": manifest.cache_pos}
    return report


def described_block(
    report: dict[str, Any], start: int, token_ids: SequenceOf[int], text: Callable[[SequenceOf[int]], str]
) -> dict[str, Any]:
    """The block of a `cache_report` that begins at position `start`, with its text and which of the turns that wrote
    the cache, counted from 1, wrote it. Raises `InvalidRequest` if there is none."""
    found = next((block for block in report["blocks"] if block["start"] == start), None)
    if found is None:
        raise InvalidRequest(f"No block of this chat that is kept begins at position {start!r:.20}.")
    turns = list(dict.fromkeys(block["written_by_turn"] for block in report["blocks"]))
    return {
        **found,
        "turn": turns.index(found["written_by_turn"]) + 1,
        "turns": len(turns),
        "text": text(token_ids[start : start + found["count"]]),
    }


def _turns_by_index(places: SequenceOf[BlockPlace], turns: SequenceOf[str | None]) -> dict[int, str | None]:
    """By index in the block tables, of the blocks that some group holds, which turn wrote them."""
    return {index: turn for (_, index), turn in zip(places, turns, strict=True)}


def _kept(tier: str, cache_pos: int, size: int, kv_format: str, turns: dict[int, str | None]) -> list[dict[str, Any]]:
    """Blocks outside the pool: they have no id and, until they come back, no owner in it."""
    return [
        {
            "id": None,
            "start": index * size,
            "count": min(size, cache_pos - index * size),
            "ref_count": 0,
            "tier": tier,
            "format": kv_format,
            "written_by_turn": turn,
            "last_audit": None,
        }
        for index, turn in turns.items()
    ]


def probe(loop: StepLoop, session_id: str, query: ProbeQuery) -> list[dict[str, Any]]:
    """Cached K or V of one layer and KV head, dequantised as the kernel reads them; no rows past `cache_pos`."""
    parts = loop.parts
    spec = parts.cache.spec
    _check_query(query, spec)
    dims = min(PROBE_DIMS, spec.head_dim) if query.dims is None else query.dims
    sequence = loop.scheduler.find(session_id)
    if sequence is None:
        return []
    start = min(query.start, sequence.cache_pos)
    count = min(query.count, sequence.cache_pos - start)
    if not count:
        return []
    loop.runner.sync_blocks()
    rows = parts.cache.read(sequence.block_tables, query.layer, query.head, query.tensor, start, count)
    norms = rows.norm(dim=-1).tolist()
    group, size = spec.places[query.layer].group, spec.block_size
    held = [sequence.blocks.holds(group, position // size) for position in range(start, start + count)]
    return [
        {
            "position": start + index,
            "token_id": sequence.token_ids[start + index],
            "token": parts.tokenizer.token_text(sequence.token_ids[start + index]),
            # A layer with a window has given up what lies before it.
            "values": [round(value, 6) for value in rows[index, :dims].tolist()] if held[index] else [],
            "norm": round(norms[index], 6) if held[index] else None,
        }
        for index in range(count)
    ]


def _check_query(query: ProbeQuery, spec: KVCacheSpec) -> None:
    if query.tensor not in ("k", "v"):
        raise InvalidRequest('tensor must be "k" or "v".')
    if not spec.num_layers:
        raise InvalidRequest("The model has no attention layers, so there are no keys and values to look at.")
    if not 0 <= query.layer < len(spec.places):
        raise InvalidRequest(f"layer must lie between 0 and {len(spec.places) - 1}.")
    if not 0 <= query.head < spec.num_kv_heads:
        raise InvalidRequest(f"head must lie between 0 and {spec.num_kv_heads - 1} (KV heads).")
    if query.start < 0:
        raise InvalidRequest("start must be at least 0.")
    if not 0 <= query.count <= MAX_PROBE_POSITIONS:
        raise InvalidRequest(f"count must lie between 0 and {MAX_PROBE_POSITIONS}.")
    if query.dims is not None and not 1 <= query.dims <= spec.head_dim:
        raise InvalidRequest(f"dims must lie between 1 and {spec.head_dim}, the size of a head.")
