"""Ours beside `transformers.generate` (float32) and llama.cpp on the same file, threads and prompts, greedy, in turn.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.peers

Each engine is a process of its own that waits while another works. Ours guesses no tokens ahead here
(`benchmarks.speculation` has that). Figures are medians over rounds, with their spread; "ahead" is ours over the
peer's, or the peer's time over ours.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from app import default_data_dir
from benchmarks.common import median, print_json, print_table, spread
from benchmarks.peers import tasks
from benchmarks.peers.child import NAMES, Child
from benchmarks.peers.quality import compare
from engine.weights.catalog import resolve

TASKS = ("contexts", "chat", "switching", "together", "restart", "quality")
Samples = dict[str, dict[str, list[float]]]  # figure -> engine -> values


class Bench:
    """What was measured of the engines."""

    def __init__(self, model: Path, names: list[str], data_dir: Path) -> None:
        self._model, self._data_dir, self._names = model, data_dir, names
        self.samples: Samples = {}

    def measure(self, task: str, rounds: int) -> None:
        """The first round warms up and is left out, except where a round takes long and starts cold anyway."""
        names = [name for name in self._names if (task, name) != ("switching", "generate")]  # which switches nothing
        children = {name: self._open(task, name) for name in names}
        warm_up = 0 if task in ("chat", "switching", "restart") else 1
        for number in range(rounds + warm_up):
            for place, name in enumerate(names):
                seed = 1000 * (10 * number + place) + 1_000_000 * TASKS.index(task)  # no prompt is asked twice
                figures = self._run(task, name, children, seed)
                for figure, value in figures.items() if number >= warm_up else ():
                    self.samples.setdefault(figure, {}).setdefault(name, []).append(value)
        for child in children.values():
            child.close()

    def _open(self, task: str, name: str) -> Child:
        return Child(name, self._model, self._data_dir, tasks.SESSIONS.get(task, 1))

    def _run(self, task: str, name: str, children: dict[str, Child], seed: int) -> tasks.Figures:
        if task == "restart":
            found, children[name] = tasks.restart(children[name], seed, lambda: self._open(task, name))
            return found
        run: dict[str, Callable[[Child, int], tasks.Figures]] = {
            "contexts": tasks.at_contexts,
            "chat": tasks.chat_without_cache if name == "generate" else tasks.chat,
            "switching": tasks.switching,
            "together": tasks.together,
        }
        return run[task](children[name], seed)


def ahead(figure: str, ours: float, theirs: float) -> float:
    """How far ours is in front: of speeds or of times."""
    return theirs / ours if figure.endswith((", ms", ", s")) else ours / theirs


def rows(samples: Samples, names: list[str]) -> list[tuple[str, ...]]:
    found = []
    for figure, by_name in samples.items():
        cells = [figure]
        for name in names:
            values = by_name.get(name)
            cells += [f"{median(values):.4g}", spread(values)] if values else ["-", ""]
            if name != "ours":
                own = by_name.get("ours")
                cells.append(f"{ahead(figure, median(own), median(values)):.2f} x" if own and values else "-")
        found.append(tuple(cells))
    return found


def head(names: list[str]) -> list[str]:
    cells = ["tokens/s where nothing else is said"]
    for name in names:
        cells += [name, "spread"] + ([] if name == "ours" else ["ahead"])
    return cells


def measured(model: Path, names: list[str], data_dir: Path, chosen: list[str], rounds: int) -> Samples:
    if not chosen:
        return {}
    bench = Bench(model, names, data_dir)
    for task in chosen:
        bench.measure(task, rounds)
    return bench.samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: the default model's)")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--peers", nargs="+", choices=NAMES[1:], default=list(NAMES[1:]))
    parser.add_argument("--quality-tokens", type=int, default=2000)
    arguments = parser.parse_args()
    model = resolve(arguments.model, arguments.data_dir).path
    result: dict[str, object] = {"model": model.name, "rounds": arguments.rounds}
    names = ["ours", *arguments.peers]
    with tempfile.TemporaryDirectory() as folder:
        samples = measured(model, names, Path(folder), [t for t in arguments.tasks if t != "quality"], arguments.rounds)
    print_table(head(names), rows(samples, names))
    result["figures"] = {
        figure: {name: {"median": median(v), "min": min(v), "max": max(v)} for name, v in by_name.items()}
        for figure, by_name in samples.items()
    }
    if "quality" in arguments.tasks:
        own, exact = compare(model, arguments.data_dir, arguments.quality_tokens)
        print(f"perplexity of the README: {own:.4f}, in float32 {exact:.4f}: {100 * (own / exact - 1):+.2f} %")
        result["perplexity"] = {"ours": own, "float32": exact}
    print_json("peers", result)


if __name__ == "__main__":
    main()
