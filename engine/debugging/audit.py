"""Audit: a session's cache against what the model computes anew of the same ids, and the fault that explains it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine.debugging.compare import NOISE_FACTOR, NOISE_TOKENS, check_room, checked_positions, layer_of
from engine.debugging.faults import Finding, Layer, classify
from engine.debugging.heat import heat_map
from engine.debugging.records import BlockContent, block_contents
from engine.debugging.report import clean_sentence, empty_result, fault_sentence, merged, state_fault
from engine.debugging.scratch import DECODED, Run, computed, continued, live, relative
from engine.errors import Conflict
from engine.jobs import Slices
from engine.lane import Lane
from engine.loader import EngineParts
from engine.sequence import Status

STATE_LIMIT = 0.02
"""Least relative error that counts, of rows and of a state, where rounding is smaller."""
NOISE_CHUNK = 23
TRACED = 64
"""Positions that are run again from the stored prefix, to tell a fault from what it made of later tokens."""


@dataclass(slots=True)
class Audit:
    """What one audit has looked at so far; `findings` by layer. Errors and limits of a layer are [2, n]."""

    ids: tuple[int, ...]
    checked: Tensor
    right: Run
    again: Run
    stored: Run
    layers: list[Layer] = field(default_factory=list)
    findings: dict[int, list[Finding]] = field(default_factory=dict)
    noise: float = 0.0


def audit(
    loop: Lane,
    parts: EngineParts,
    session_id: str,
    positions: int | list[int] | None = None,
    scope: str = "audit",
) -> Slices[dict[str, Any]]:
    """The body of `POST /api/sessions/{id}/audit`. `positions`: how many, evenly spread, or which; None: all.
    `scope`: "audit" where somebody asked for it, else what it was made for by itself.

    Touches no session. Raises `Conflict` while the session is answering, and `InvalidRequest` for positions that are
    not cached, or where the KV budget has no room for two more copies.
    """
    began = time.perf_counter()
    sequence = loop.scheduler.find(session_id)
    if sequence is None or not sequence.cache_pos:
        return empty_result()
    if sequence.status is not Status.IDLE:
        raise Conflict("This session is still answering; wait for the reply or stop it first.")
    checked = checked_positions(positions, sequence.cache_pos)
    check_room(parts, sequence.cache_pos)
    ids = tuple(sequence.token_ids[: sequence.cache_pos])
    following = sequence.token_ids[len(ids)] if sequence.remaining else ids[-1]
    contents = block_contents(sequence)
    stored = live(loop, parts, sequence, following)
    yield
    look = yield from _compared(parts, ids, checked, stored, following)
    yield from _explained(loop, parts, look, session_id)
    follows = yield from _consequences(parts, look)
    result = _result(look, follows, contents)
    result["scope"] = scope
    result["ms"] = round(1e3 * (time.perf_counter() - began), 1)
    _remember(loop, session_id, contents, checked, result, parts.cache.spec.block_size)
    return result


def _compared(parts: EngineParts, ids: tuple[int, ...], checked: Tensor, stored: Run, following: int) -> Slices[Audit]:
    right = yield from computed(parts, ids, parts.limits.mixed_batch_tokens, following)
    most = len(ids) if parts.states is not None else NOISE_TOKENS
    again = yield from computed(parts, ids[:most], NOISE_CHUNK, following if most >= len(ids) else None, DECODED)
    if stored.rows is not None and right.rows is not None:
        checked &= stored.rows.positions_held()
        stored = replace(stored, rows=stored.rows.filled(right.rows))
    look = Audit(ids, checked, right, again, stored)
    for index in range(stored.rows.layers if stored.rows is not None else 0):
        yield
        assert stored.rows is not None and right.rows is not None and again.rows is not None
        inv_freq = parts.model.inv_freq(index).cpu()
        layer, noise = layer_of(
            index, stored.rows, right.rows, again.rows, checked, inv_freq, parts.cache.spec.block_size
        )
        found = classify(layer)
        if found:
            look.findings[index] = found
        look.layers.append(layer if found else layer.without_rows())
        look.noise = max(look.noise, noise)
    return look


def _explained(loop: Lane, parts: EngineParts, look: Audit, session_id: str) -> Slices[None]:
    """Where a fault can't be explained, try the ids that stood there before an edit."""
    unknown = [index for index, found in look.findings.items() if any(f.kind == "overwrite" for f in found)]
    if not unknown:
        return
    end = 1 + max(f.positions[-1] for index in unknown for f in look.findings[index])
    versions = []
    for old in loop.records.earlier(session_id, look.ids):
        versions.append((yield from computed(parts, old[:end], parts.limits.mixed_batch_tokens)).rows)
    for index in unknown if versions else ():
        yield
        look.findings[index] = classify(
            look.layers[index], [rows.layer(index) for rows in versions if rows is not None]
        )


def _consequences(parts: EngineParts, look: Audit) -> Slices[list[tuple[int, Finding]]]:
    """Findings that are no faults of their own: the model computed just that from lower layers' wrong rows.

    Told by running their positions again from what is stored before them. A recurrent layer can't be begun in the
    middle; there, what can't be explained behind a fault of a lower layer counts as made by it.
    """
    follows = []
    stored = look.stored.rows
    for index, finding in sorted(
        ((index, f) for index, found in look.findings.items() for f in found), key=lambda pair: pair[1].positions[0]
    ):
        first = finding.positions[0]
        before = any(f.positions[0] < first for other, found in look.findings.items() if other < index for f in found)
        if finding.kind != "overwrite" or not before or stored is None:
            continue
        if parts.states is None:
            made = yield from continued(parts, look.ids[: min(first + TRACED, len(look.ids))], stored, first)
            where = torch.tensor([p for p in finding.positions if p < made.count])
            layer = look.layers[index]
            fits = layer.residuals(where, made.layer(index)[:, where]) <= layer.limits[:, where].amax(0)
            if not bool(fits.float().mean() > 0.5):
                continue
        follows.append((index, finding))
    for index, finding in follows:
        look.findings[index].remove(finding)
    return follows


def _result(look: Audit, follows: list[tuple[int, Finding]], contents: list[BlockContent]) -> dict[str, Any]:
    errors = [float(layer.errors.nan_to_num(math.inf).max()) for layer in look.layers]
    faults = merged(look.findings, look.layers[0].block_size if look.layers else 1)
    state_error = _error(look.stored.state, look.right.state)
    logits_error = _logits_error(look.stored.logits, look.right.logits)
    state_limit = max(STATE_LIMIT, NOISE_FACTOR * (_error(look.again.state, look.right.state) or 0.0))
    if state_error is not None and not state_error <= state_limit and not faults:
        faults.append(state_fault(len(look.ids) - 1, state_error))
    for fault in faults:
        index = fault["first_position"] // max(len(look.layers) and look.layers[0].block_size, 1)
        fault["since_turn"] = contents[index][0] if look.layers and index < len(contents) else None
    size = int(look.checked.sum()) if look.layers else len(look.ids)
    result = {
        "verdict": "fault" if faults else "clean",
        "scope": "audit",
        "noise_floor": look.noise,
        "max_error": max([*errors, state_error or 0.0]),
        "state_error": state_error,
        "logits_error": logits_error,
        "faults": faults,
        "since_turn": min(faults, key=lambda f: f["first_position"])["since_turn"] if faults else None,
        "follows": [{"layer": index, "first_position": f.positions[0], "last_position": f.positions[-1]}
                    for index, f in follows],
        "checked_tokens": size,
        "cache_pos": len(look.ids),
        "heat": heat_map(look.layers, look.checked),
    }  # fmt: skip
    turns = list(dict.fromkeys(turn for turn, _ in contents))
    result["sentence"] = fault_sentence(faults, turns) if faults else clean_sentence(result, len(look.layers))
    return result


def _error(found: dict[str, Tensor] | None, right: dict[str, Tensor] | None) -> float | None:
    """The largest relative error of a state's tensors over its layers; NaN where a value is not finite."""
    if found is None or right is None:
        return None
    values = [relative(a, b) for name in right for a, b in zip(found[name], right[name], strict=True)]
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _logits_error(found: Tensor | None, right: Tensor | None) -> float | None:
    return None if found is None or right is None else relative(found, right)


def _remember(
    loop: Lane,
    session_id: str,
    contents: list[BlockContent],
    checked: Tensor,
    result: dict[str, Any],
    size: int,
) -> None:
    bad = [(f["first_position"] // size, f["last_position"] // size) for f in result["faults"]]
    looked_at = set((checked.nonzero().flatten() // size).tolist())
    blocks = [
        (index, content, "fault" if any(first <= index <= last for first, last in bad) else "clean")
        for index, content in enumerate(contents)
        if index in looked_at
    ]
    loop.records.audited(session_id, result, blocks)
