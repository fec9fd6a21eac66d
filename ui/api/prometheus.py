"""The engine's counters in the text format that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(report: Mapping[str, Any] | None) -> str:
    """`report` is what `ChatEngine.metrics()` gives; None while no engine runs."""
    lines = _family("kvscope_up", "gauge", "1 while a model is loaded.", [("", int(report is not None))])
    if report is None:
        return "\n".join(lines) + "\n"
    turns = [(_label("finish_reason", reason), count) for reason, count in sorted(report["turns"].items())]
    lines += _family("kvscope_turns_total", "counter", "Replies that ended, by reason.", turns)
    tokens = [(_label("kind", kind), count) for kind, count in sorted(report["tokens"].items())]
    text = "Prompt tokens reused and computed; tokens generated; those guessed and run ahead, those that came true."
    lines += _family("kvscope_tokens_total", "counter", text, tokens)
    lines += _histogram("kvscope_ttft_seconds", "Time from a request to its first token.", report["ttft_seconds"])
    lines += _histogram("kvscope_token_seconds", "Time between two tokens of a reply.", report["token_seconds"])
    blocks = [(_label("state", state), report[f"blocks_{state}"]) for state in ("used", "free")]
    lines += _family("kvscope_blocks", "gauge", "Blocks of the KV cache.", blocks)
    kv_bytes = [(_label("place", place), report[f"kv_{place}_bytes"]) for place in ("reserved", "ram", "disk")]
    lines += _family(
        "kvscope_kv_bytes", "gauge", "KV cache: reserved for the pool, idle sessions in RAM and on disk.", kv_bytes
    )
    empty, reserved = report["kv_empty_bytes"], report["kv_reserved_bytes"]
    lines += _family("kvscope_kv_empty_bytes", "gauge", "Reserved bytes that hold no token.", [("", empty)])
    share = round(empty / reserved, 6) if reserved else 0.0
    lines += _family("kvscope_kv_fragmentation", "gauge", "Share of the reserved bytes that is empty.", [("", share)])
    lines += _family(
        "kvscope_queue_length", "gauge", "Replies that wait for their first step.", [("", report["waiting"])]
    )
    lines += _family("kvscope_running", "gauge", "Replies in the making.", [("", report["running"])])
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *(f"{name}{label} {value}" for label, value in samples)]


def _histogram(name: str, text: str, histogram: Mapping[str, Any]) -> list[str]:
    lines = [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
    below = 0
    for bound, count in zip([*histogram["bounds"], "+Inf"], histogram["counts"], strict=True):
        below += count
        lines.append(f"{name}_bucket{_label('le', bound)} {below}")
    return [*lines, f"{name}_sum {histogram['sum']}", f"{name}_count {histogram['count']}"]


def _label(name: str, value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{name}="{text}"}}'
