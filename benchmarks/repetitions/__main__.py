"""How often the diagnosis names the cause of a loop, where that is known: `cases` says what counts as known.

python -m benchmarks.repetitions [--cases 15] [--tokens 200]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from app import default_data_dir
from benchmarks.common import median, print_json, print_table, until
from benchmarks.repetitions.bench import Bench, Reply
from benchmarks.repetitions.cases import (
    cache_cases,
    model_cases,
    none_cases,
    precision_cases,
    sampler_cases,
)
from benchmarks.repetitions.damage import with_outlier_keys
from engine.debugging.verdict import VERDICTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="as for app.py; default: the default model")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir())
    parser.add_argument("--cases", type=int, default=15, help="cases per cause")
    parser.add_argument("--cause", choices=VERDICTS, action="append", help="only this one; may be given again")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per reply")
    parser.add_argument("--limit-s", type=float, help="stop after so many seconds, and tell what was run by then")
    options = parser.parse_args()
    causes = options.cause or VERDICTS
    fine, coarse, stubborn = Bench(options, "fp16"), None, None
    tried: Counter[str] = Counter()
    made = {"none": (fine, none_cases(fine, tried)), "sampler": (fine, sampler_cases(fine, tried))}
    if "precision" in causes:
        coarse = Bench(options, "int4")
        with_outlier_keys(coarse.engine)
        made["precision"] = (coarse, precision_cases(coarse, fine, tried))
    made["cache"] = (fine, cache_cases(fine, tried))
    if "model" in causes:
        stubborn = Bench(options, "fp16")
        made["model"] = (stubborn, model_cases(stubborn, fine, tried))
    made = {cause: cases for cause, cases in made.items() if cause in causes}
    found: Counter[tuple[str, str]] = Counter()
    seconds: list[float] = []
    for cause, verdict, took in until(judged(made, options.cases), options.limit_s):
        found[cause, verdict] += 1
        seconds.append(took)
    report(found, tried, seconds)
    for bench in (fine, coarse, stubborn):
        if bench is not None:
            bench.engine.close()


def judged(made: dict[str, tuple[Bench, Iterator[Reply]]], count: int) -> Iterator[tuple[str, str, float]]:
    """Cause, verdict and the diagnosis' seconds of each case. Causes take turns, so that wherever this ends each has
    been tried as often as the others, as far as it could be made."""
    left = {cause: (bench, islice(replies, count)) for cause, (bench, replies) in made.items()}
    while left:
        for cause, (bench, replies) in list(left.items()):
            reply = next(replies, None)
            if reply is None:
                del left[cause]
                continue
            began = time.perf_counter()
            result = bench.engine.diagnose(reply.query)
            took = time.perf_counter() - began
            show(cause, reply, result, took)
            yield cause, result["verdict"], took


def show(cause: str, reply: Reply, result: dict[str, Any], took: float) -> None:
    runs = [f"{item['run']} {item['looped']}/{item['runs']}" for item in result["evidence"] if "runs" in item]
    drift = next((item["first"] for item in result["evidence"] if item["run"] == "measures"), None)
    losses = [item["mean_kl"] for item in result["evidence"] if "mean_kl" in item]
    measured = f"{took:4.1f} s {reply.loop} drift from {drift}; KL {losses}; {', '.join(runs)}"
    print(f"{cause:>9} -> {result['verdict']:<9} {measured}", flush=True)
    if result["verdict"] != cause:
        for item in result["evidence"]:
            print(f"{'':>12} {item['run']}: {item['sentence']}", flush=True)


def report(found: Counter[tuple[str, str]], tried: Counter[str], seconds: Sequence[float]) -> None:
    cases = {cause: sum(found[cause, verdict] for verdict in VERDICTS) for cause in VERDICTS}
    rows = [[cause, tried[cause], *(found[cause, verdict] for verdict in VERDICTS)] for cause in VERDICTS]
    print_table(["made by \\ verdict", "tried", *VERDICTS], rows)
    total, right = sum(cases.values()), sum(found[cause, cause] for cause in VERDICTS)
    median_s, longest_s = (round(median(seconds), 1), round(max(seconds), 1)) if seconds else (None, None)
    print(f"{right} of {total} right; a diagnosis takes {median_s} s (median), {longest_s} s at most")
    result = {"cases": total, "right": right, "share": right / total if total else None}
    counts = {"made": cases, "tried": {cause: tried[cause] for cause in VERDICTS}}
    confusion = {f"{a}->{b}": n for (a, b), n in sorted(found.items())}
    times = {"median_s": median_s, "longest_s": longest_s}
    print_json("repetitions", {**result, **times, **counts, "confusion": confusion})


if __name__ == "__main__":
    main()
