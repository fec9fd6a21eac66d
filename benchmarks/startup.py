"""Seconds from the command to the line that says a chat could be sent, beside transformers reading the same file.

    python -m benchmarks.startup

First: as on a machine where the CPU kernels were never compiled. Later: any start after that. transformers: a process
of its own that loads tokenizer and model of the default model and does nothing else.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from app import default_data_dir
from benchmarks.common import median, print_json, print_table, spread
from engine.weights.catalog import ModelSource, resolve
from kernels.cpu import kept

ROOT = Path(__file__).parent.parent
LOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=sys.argv[2])
AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=sys.argv[2])
"""


def app_start(data_dir: Path) -> float:
    command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", str(data_dir)]
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = any(line.startswith("KVScope ready: ") for line in iter(process.stdout.readline, ""))
        seconds = time.perf_counter() - start
        process.terminate()
    if not ready:
        raise SystemExit("the app did not start")
    return seconds


def first_start(data_dir: Path) -> float:
    folder = kept.folder()
    if folder is not None:
        shutil.rmtree(folder)
        folder.mkdir()
    return app_start(data_dir)


def transformers_load(source: ModelSource) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-c", LOAD, str(source.path.parent), source.path.name]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    source = resolve(None, arguments.data_dir)
    seconds: dict[str, list[float]] = {"first": [], "later": [], "transformers": []}
    for _ in range(arguments.rounds):
        seconds["first"].append(first_start(arguments.data_dir))
        seconds["later"].append(app_start(arguments.data_dir))
        seconds["transformers"].append(transformers_load(source))
    rows = [(name, f"{median(values):.1f}", spread(values)) for name, values in seconds.items()]
    print_table(("start", "seconds", "spread"), rows)
    print_json("startup", {"model": source.name, **{name: median(values) for name, values in seconds.items()}})


if __name__ == "__main__":
    main()
