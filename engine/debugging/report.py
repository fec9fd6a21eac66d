"""Audits in words and as data for the API: faults of several layers that are one, and the sentence about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.debugging.faults import Finding

WORDS = {
    "shift": "hold the rows of {amount} {direction}",
    "overwrite": "were overwritten with something else",
    "stale": "still hold what stood there before an edit",
    "wrong_position": "have keys that are rotated {amount} too {reach}",
    "swap_blocks": "are two blocks that hold each other's rows",
    "scale": "are {amount} times what they should be",
    "nan": "are not finite",
}


def empty_result() -> dict[str, Any]:
    """Of a session of which nothing is cached."""
    return {
        "verdict": "clean", "scope": "audit", "noise_floor": 0.0, "max_error": 0.0, "state_error": None,
        "logits_error": None, "faults": [], "since_turn": None, "follows": [], "checked_tokens": 0, "cache_pos": 0,
        "heat": {"columns": [], "values": []}, "sentence": "Nothing of this session is in the cache.", "ms": 0.0,
    }  # fmt: skip


def merged(findings: Mapping[int, Sequence[Finding]], block_size: int) -> list[dict[str, Any]]:
    """Findings of the layers as faults: the same kind at the same place, to a block, is one fault of several layers."""
    faults: list[dict[str, Any]] = []
    for layer, found in sorted(findings.items()):
        for finding in found:
            fault = next((known for known in faults if _same(known, finding, block_size)), None)
            if fault is None:
                fault = {"kind": finding.kind, "tensor": "kv", "layers": [], "max_error": 0.0, "amount": finding.amount}
                fault |= {"first_position": finding.positions[0], "last_position": finding.positions[-1]}
                faults.append(fault)
            fault["layers"].append(layer)
            fault["first_position"] = min(fault["first_position"], finding.positions[0])
            fault["last_position"] = max(fault["last_position"], finding.positions[-1])
            fault["max_error"] = _larger(fault["max_error"], finding.max_error)
    return sorted(faults, key=lambda fault: (fault["first_position"], fault["layers"]))


def state_fault(position: int, error: float) -> dict[str, Any]:
    """Of a recurrent state behind rows that are right: where it went wrong can't be told."""
    kind = "nan" if math.isnan(error) else "overwrite"
    return {"kind": kind, "tensor": "state", "layers": [], "max_error": error, "amount": None,
            "first_position": position, "last_position": position}  # fmt: skip


def fault_sentence(faults: Sequence[Mapping[str, Any]], turns: Sequence[str | None]) -> str:
    """The first fault in words, and how many more there are. `turns`: those that wrote the cache, oldest first."""
    fault = faults[0]
    first, last = fault["first_position"], fault["last_position"]
    if fault["tensor"] == "state":
        return f"The recurrent state behind position {last} is not what the model computes of these tokens."
    since = ""
    if fault["since_turn"] in turns and fault["since_turn"] is not None:
        since = f", since turn {turns.index(fault['since_turn']) + 1} of the {len(turns)} that wrote this cache"
    place = f"position {first}" if first == last else f"positions {first} to {last}"
    amount = fault["amount"] or 0
    words = WORDS[fault["kind"]].format(
        amount=f"{amount:g}" if fault["kind"] == "scale" else _positions(abs(int(amount))),
        direction="earlier" if amount > 0 else "later",
        reach="far" if amount > 0 else "little",
    )
    more = "" if len(faults) == 1 else f" {len(faults) - 1} more fault{'s' if len(faults) > 2 else ''} found."
    return f"{_layers(fault['layers'])}: {place} {words} ({fault['kind']}){since}.{more}"


def clean_sentence(result: Mapping[str, Any], layers: int) -> str:
    what = f"{result['checked_tokens']} positions in {layers} layers" if layers else "The recurrent state"
    return f"{what} hold what the model computes anew, within {max(result['max_error'], result['noise_floor']):.2g}."


def _same(fault: Mapping[str, Any], finding: Finding, block_size: int) -> bool:
    near = max(abs(fault["first_position"] - finding.positions[0]), abs(fault["last_position"] - finding.positions[-1]))
    amounts = fault["amount"] == finding.amount or fault["kind"] == "scale"
    return bool(fault["kind"] == finding.kind and amounts and near < block_size)


def _positions(count: int) -> str:
    return f"{count} position" if count == 1 else f"{count} positions"


def _layers(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"Layer {layers[0]}"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"Layers {layers[0]} to {layers[-1]}"
    return f"Layers {', '.join(map(str, layers))}"


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
