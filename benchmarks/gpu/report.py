"""Tables to read, one JSON line to keep, and a file of it named by card, date and commit."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, print_json, print_table
from engine.memory.plan import human_bytes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def card(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": "no card, interpreted", "capability": None, "memory": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
    }


def commit() -> str:
    """Of the code that runs, with a mark where files differ from it; "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty=-changed", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def verdict(share: float, goal: float | None, met: bool | None) -> str:
    """A share, and beside it what it should be: "91.0 %, goal 85 %: met"."""
    if goal is None or met is None:
        return f"{100 * share:.1f} %"
    return f"{100 * share:.1f} %, goal {100 * goal:.0f} %: {'met' if met else 'not met'}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def print_attention(rows: Sequence[dict[str, Any]]) -> None:
    print("\npaged_decode with its reduction, one layer; share of the copy bandwidth beside its goal\n")
    head = ("model", "cache", "context", "ms", "spread", "share", "sdpa, ms", "compiled torch, ms")
    print_table(
        head,
        [
            (
                row["model"],
                row["kv_format"],
                row["context"],
                _number(row["ms"], 4),
                row["ms_spread"],
                verdict(row["share"], row["goal"], row["met"]),
                _number(row["sdpa_ms"], 4),
                _number(row["compiled_ms"], 4),
            )
            for row in rows
        ],
    )


def print_steps(rows: Sequence[dict[str, Any]]) -> None:
    print("\ndecode steps of one sequence; share of the floor, bytes / copy bandwidth, and of waiting for the host\n")
    head = (
        "model",
        "weights",
        "floor, ms",
        "step, ms",
        "spread",
        "share",
        "host gap",
        "tokens/s",
        "generate",
        "memory",
    )
    table = []
    for row in rows:
        gap = f"{100 * row['host_gap']:.1f} %, goal below {100 * row['host_gap_goal']:.0f} %: "
        used = f"{human_bytes(row['memory'])}, planned {human_bytes(row['memory_plan'])}: "
        other = _number(row["generate_tokens_per_s"], 1)
        table.append(
            (
                row["model"],
                row["weights"],
                _number(row["floor_ms"]),
                _number(row["step_ms"]),
                row["step_ms_spread"],
                verdict(row["share"], row["goal"], row["met"]),
                gap + ("met" if row["host_gap_met"] else "not met"),
                _number(row["tokens_per_s"], 1),
                other if row["interleaved"] or other == "-" else f"{other} (afterwards)",
                used + ("met" if row["memory_met"] else "not met"),
            )
        )
    print_table(head, table)


def keep(result: dict[str, Any], folder: Path) -> Path:
    """Write the result as JSON; the name says on what card, when and of which commit."""
    name = re.sub(r"[^a-z0-9]+", "-", result["card"]["name"].lower()).strip("-")
    path = folder / f"{name}-{result['date'][:10]}-{result['commit']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": "gpu", **machine(), **result}, indent=1) + "\n")
    return path


def finish(result: dict[str, Any], folder: Path | None) -> None:
    result |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}
    for reason in result["skipped"]:
        print(f"left out: {reason}")
    if folder is not None:
        print(f"kept as {keep(result, folder)}")
    print_json("gpu", result)
