"""Recorded sessions run again. A FILE is what a chat's menu, or `GET /api/sessions/{id}/export`, gives.

    python -m benchmarks.replay FILE            to the same ids, or says at which turn and token they part
    python -m benchmarks.replay FILE... --load  all sessions at once, when they were asked for: tokens/s, TTFT, hits

Tables, then one JSON line. The exit code is 1 if a turn parted or failed, 2 for a bad file or argument.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app import default_data_dir
from benchmarks.common import print_json, print_table
from benchmarks.replay.files import BadFile, RecordedSession, differences, read_session
from benchmarks.replay.load import arrivals, play, report
from benchmarks.replay.rerun import rerun
from engine.config import DEVICES, DTYPES, EngineConfig
from engine.errors import ConfigError, KVScopeError
from engine.loader import EngineParts, load_parts
from engine.local import LocalEngine
from ui.arguments import Parser


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "benchmarks.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE")
    add("--load", action="store_true", help="replay as load: sessions run at once, replies are given and not drawn")
    add("--speed", type=float, default=1.0, help="of the recorded gaps, inf for none (default: 1)")
    add("--max-gap", type=float, default=30.0, metavar="S", help="longer gaps are cut to this (default: 30)")
    add("--model", metavar="NAME|DIR|FILE", help="what the file was recorded with (default: the default model)")
    add("--device", choices=DEVICES, default="auto")
    add("--dtype", choices=DTYPES, default="auto")
    add("--window", type=int)
    add("--sinks", type=int, default=0)
    add("--share-layers", type=int, default=1)
    add("--max-seq-len", type=int)
    add("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    return parser


def engine_config(options: argparse.Namespace, session: RecordedSession) -> EngineConfig:
    """The options, with block size, and the format of chats that asked for none, as recorded."""
    first = session.typical
    size = str(first.fingerprint.get("block size", ""))
    return EngineConfig(
        data_dir=options.data_dir,
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        kv_format=(first.params.kv_format if first.default_format else None) or "auto",
        max_seq_len=options.max_seq_len,
        block_size=int(size) if size.isascii() and size.isdecimal() and 0 < int(size[:5]) <= 1024 else 16,
        snapshot_limit=0,
        window=options.window,
        sinks=options.sinks,
        share_layers=options.share_layers,
    )


def run_again(engine: LocalEngine, sessions: Sequence[RecordedSession]) -> dict[str, Any]:
    """Print each turn's outcome; the numbers of the JSON line."""
    began, parted = time.perf_counter(), []
    count = {"turns": 0, "skipped": 0, "tokens": 0, "reused_tokens": 0, "recorded_reused_tokens": 0}
    rows = []
    for session, outcome in rerun(engine, sessions):
        turn, then = outcome.turn, outcome.turn.stats.get("reused_tokens")
        now = outcome.stats.reused_tokens if outcome.stats is not None else None
        rows.append((session.name, turn.number, len(turn.prompt_ids), then, now, outcome.sentence))
        if turn.skipped is not None:
            count["skipped"] += 1
            continue
        count["turns"] += 1
        count["tokens"] += len(turn.reply_ids)
        count["reused_tokens"] += now or 0
        count["recorded_reused_tokens"] += then if isinstance(then, int) else 0
        if outcome.parted is not None:
            parted.append({"file": session.name, "turn": turn.number, "token": outcome.parted})
    print_table(("file", "turn", "prompt", "reused then", "now", "reply"), rows)
    seconds = round(time.perf_counter() - began, 3)
    return {**count, "same": count["turns"] - len(parted), "parted": parted, "seconds": seconds}


def run_as_load(engine: LocalEngine, sessions: Sequence[RecordedSession], speed: float, gap_s: float) -> dict[str, Any]:
    answers = play(engine, arrivals(sessions, speed, gap_s))
    for answer in answers:
        if answer.error is not None:
            print(f"{sessions[answer.arrival.session].name}: turn {answer.arrival.turn.number} failed: {answer.error}")
    found = {"speed": str(speed), **report(answers)}
    shares = found["ttft_ms"]
    rows = [(f"first token, {share}, ms", shares[share], found["recorded_ttft_ms"][share]) for share in shares]
    rows += [("hit rate", found["hit_rate"], found["recorded_hit_rate"]), ("tokens/s", found["tokens_per_s"], "")]
    print_table(("", "replay", "recorded"), rows)
    return found


def run(options: argparse.Namespace, load: Callable[[EngineConfig], EngineParts]) -> int:
    if not options.load and (options.speed != 1.0 or options.max_gap != 30.0):
        raise ConfigError("--speed and --max-gap need --load.")
    if not options.speed > 0 or not options.max_gap >= 0:
        raise ConfigError("--speed must be above 0, and --max-gap at least 0.")
    sessions = [read_session(path) for path in options.files]
    engine = LocalEngine(engine_config(options, sessions[0]), load)
    engine.start()
    try:
        engine.wait_ready()
        known = engine.capabilities()
        sessions = [session.fitting(engine.fingerprint, known["vocab_size"]) for session in sessions]
        other = sorted({key for session in sessions for key in differences(session.typical, engine.fingerprint)})
        if other:
            print(f"When this was recorded, other than now: {', '.join(other)}.")
        if options.load:
            found = run_as_load(engine, sessions, options.speed, options.max_gap)
        else:
            found = run_again(engine, sessions)
    finally:
        engine.close()
    print_json(
        "replay",
        {"model": known["model"], "files": [session.name for session in sessions], "load": options.load, **found},
    )
    return 1 if found.get("parted") or found.get("failed") else 0


def main(arguments: Sequence[str] | None = None, load: Callable[[EngineConfig], EngineParts] = load_parts) -> int:
    """The exit code."""
    try:
        return run(make_parser().parse_args(arguments), load)
    except (KVScopeError, BadFile) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
