"""Seconds from the command to the line that says a chat could be sent, and to the first token of one, beside
transformers reading the same file.

    python -m benchmarks.startup

First: as on a machine where the CPU kernels were never compiled. Later: any start after that. transformers: a process
of its own that loads tokenizer and model of the default model and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.request
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


def app_start(data_dir: Path) -> tuple[float, float]:
    """Seconds until the app says that it is ready, and until the first token of a first chat is there."""
    command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", str(data_dir)]
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next((line for line in iter(process.stdout.readline, "") if line.startswith("KVScope ready: ")), None)
        if line is None:
            raise SystemExit("the app did not start")
        ready = time.perf_counter() - start
        try:
            first_token(line.split()[2])
            answered = time.perf_counter() - start
        finally:
            process.terminate()
    return ready, answered


def first_token(url: str) -> None:
    with urllib.request.urlopen(f"{url}/health") as health:
        assert json.load(health)["status"] == "ok"
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()


def first_start(data_dir: Path) -> tuple[float, float]:
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
    seconds: dict[str, list[float]] = {}
    for number in range(arguments.rounds):
        for kind, start in (("first", first_start), ("later", app_start)):
            ready, answered = start(arguments.data_dir)
            seconds.setdefault(kind, []).append(ready)
            seconds.setdefault(f"{kind}, first token", []).append(answered)
            print(f"round {number + 1}, {kind}: ready {ready:.1f} s, first token {answered:.1f} s", flush=True)
        seconds.setdefault("transformers", []).append(transformers_load(source))
        print(f"round {number + 1}, transformers: {seconds['transformers'][-1]:.1f} s", flush=True)
    rows = [(name, f"{median(values):.1f}", spread(values)) for name, values in seconds.items()]
    print_table(("start", "seconds", "spread"), rows)
    medians = {name.replace(", ", "_").replace(" ", "_"): median(values) for name, values in seconds.items()}
    print_json("startup", {"model": source.name, **medians})


if __name__ == "__main__":
    main()
