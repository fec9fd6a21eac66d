"""Resident memory of the running app by part, when it is ready and after a chat of 1,000 tokens.

    python -m benchmarks.memory

The model behind the number: what must be there is the model's file, the cache's bytes, and the interpreter with all
libraries, which a process of its own imports without loading a model. `ratio` is the app's resident set over their sum;
`unexplained` the share of it that is in no part, each of which is measured in another way (`engine.memory.watch`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from app import default_data_dir
from benchmarks.common import print_json, print_table
from engine.memory.watch import FRESH_S
from engine.weights.catalog import ModelSource, resolve

ROOT = Path(__file__).parent.parent
PROMPT, REPLY = 936, 64
MIB = 2**20
IMPORTS = """
import app, engine.local, ui.api.routes, ui.layout, uvicorn
from kernels.dispatch import cpu_kernels
cpu_kernels()
from engine.memory.process import resident_bytes
print(resident_bytes())
"""


def libraries_bytes() -> int:
    """What a process holds that has imported all that the app imports."""
    found = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, check=True, capture_output=True, text=True)
    return int(found.stdout.split()[-1])


@contextmanager
def running_app(source: ModelSource) -> Iterator[str]:
    """The address of an app with this model and an empty data folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", folder]
        command += ["--model", str(source.path), "--device", "cpu"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            ready = next(line for line in iter(process.stdout.readline, "") if line.startswith("KVScope ready: "))
            try:
                yield ready.split()[2]
            finally:
                process.terminate()


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url + path, data, {"content-type": "application/json"})
    with build_opener(ProxyHandler({})).open(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def reading(url: str) -> dict[str, Any]:
    """The process's parts, taken after what was asked last."""
    time.sleep(FRESH_S + 0.5)
    found: dict[str, Any] = ask(url, "/api/memory")["process"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    source = resolve(None, parser.parse_args().data_dir)
    libraries, file = libraries_bytes(), source.path.stat().st_size
    readings = {}
    with running_app(source) as url:
        readings["ready"] = reading(url)
        prompt = [1000 + 7 * index for index in range(PROMPT)]
        ask(url, "/v1/completions", {"prompt": prompt, "max_tokens": REPLY, "temperature": 0, "ignore_eos": True})
        readings["after 1,000 tokens"] = reading(url)
    names = [*readings["ready"]["parts"], "unexplained", "rss"]
    figures = {when: {**one["parts"], **{name: one[name] for name in names[-2:]}} for when, one in readings.items()}
    print_table(("MiB", *figures), [(name, *(f"{one[name] / MIB:.1f}" for one in figures.values())) for name in names])
    print(f"model file {file / MIB:.1f} MiB, interpreter and libraries without a model {libraries / MIB:.1f} MiB")
    last = figures["after 1,000 tokens"]
    result = {
        "model": source.name,
        "ratio_ready": round(figures["ready"]["rss"] / (file + libraries), 3),
        "ratio": round(last["rss"] / (file + last["kv"] + libraries), 3),
        "unexplained": max(round(abs(one["unexplained"]) / one["rss"], 4) for one in figures.values()),
    }
    print_json("memory", result)


if __name__ == "__main__":
    main()
