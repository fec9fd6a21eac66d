"""One engine in a process of its own: requests and answers are lines of JSON on standard input and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Generate, LlamaCpp, Ours, Peer, Reply

NAMES = ("ours", "generate", "llama.cpp")


class Child:
    """The parent's side. `ready_s`: from the start of the process until it answered."""

    def __init__(self, name: str, model: Path, data_dir: Path, sessions: int) -> None:
        start = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.peers.child", name, str(model), str(data_dir), str(sessions)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()
        self.ready_s = time.perf_counter() - start

    def run(self, prompt: list[int], tokens: int, session: str | None = None) -> Reply:
        return Reply(**self._ask({"run": [prompt, tokens, session]}))

    def together(self, prompts: list[list[int]], tokens: int) -> float:
        seconds: float = self._ask({"together": [prompts, tokens]})
        return seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._process.args[3:5])} ended: is the peer installed?")  # type: ignore[index]
        return json.loads(line)


def _build(name: str, model: Path, data_dir: Path, sessions: int) -> Peer:
    if name == "ours":
        return Ours(model, data_dir)
    return Generate(model) if name == "generate" else LlamaCpp(model, sessions)


def main() -> None:
    name, model, data_dir, sessions = sys.argv[1:]
    if name != "ours":  # the package asks OpenMP's threads not to spin, which others were not made for
        os.environ.pop("OMP_WAIT_POLICY", None)
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = _build(name, Path(model), Path(data_dir), int(sessions))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "run" in request:
            answer: Any = asdict(peer.run(*request["run"]))
        else:
            answer = peer.together(*request["together"])
        print(json.dumps(answer), file=answers, flush=True)
    peer.close()
    os._exit(0)


if __name__ == "__main__":
    main()
