"""`python app.py` as a person starts it: a process of its own, asked over HTTP."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent.parent
START_S = 120.0
REQUEST_S = 120.0


class AppProcess:
    """The running app. Keyword arguments become settings of the sessions that `session` makes."""

    def __init__(self, data_dir: Path, *args: str, port: int = 0, key: str | None = None) -> None:
        self.data_dir, self.args, self.port, self.key = data_dir, args, port, key
        self.url = ""
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()

    def start(self, until_ready: bool = True) -> AppProcess:
        """Begin; with `until_ready` wait for the line that says a chat could be sent."""
        command = [sys.executable, "app.py", "--no-browser", "--port", str(self.port)]
        command += ["--data-dir", str(self.data_dir), *self.args, *(["--api-key", self.key] if self.key else [])]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSCOPE_")}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        threading.Thread(target=self._read, daemon=True).start()
        if until_ready:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line is not None, f"the app ended before it was ready: {self.output}"
            if line.startswith("KVScope ready: "):
                self.url = line.split()[2]
                self.port = int(self.url.rsplit(":", 1)[1])
                return

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal and wait for the end; the exit code. Does nothing to a process that has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip())
            self._lines.put(line)
        self._lines.put(None)

    # -- its HTTP interface

    def request(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        with httpx.Client(trust_env=False, timeout=REQUEST_S, headers=headers) as client:
            answer = client.request(method, self.url + path, json=body)
        assert answer.status_code == 200, f"{method} {path}: {answer.status_code} {answer.text[:300]}"
        return answer.json()

    def session(self, max_tokens: int = 16, title: str | None = None, **params: Any) -> str:
        """The id of a new session whose replies are greedy and have exactly `max_tokens` tokens."""
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **params}
        body = {"params": params} if title is None else {"params": params, "title": title}
        return str(self.request("POST", "/api/sessions", body)["id"])

    def say(self, session_id: str, content: str) -> str:
        """One turn, to its end; the reply."""
        return str(self.request("POST", f"/api/sessions/{session_id}/messages", {"content": content})["content"])

    def messages(self, session_id: str) -> list[dict[str, Any]]:
        """The messages of the current branch."""
        found: list[dict[str, Any]] = self.request("GET", f"/api/sessions/{session_id}")["messages"]
        return found

    def numbers(self, session_id: str, index: int = -1) -> dict[str, Any]:
        """What a finished turn took; it is stored after the reply's text, which a page shows before."""
        found: dict[str, Any] = wait_for(lambda: self.messages(session_id)[index]["kvscope"], "a turn's numbers")
        return found

    def running(self, session_id: str) -> bool:
        return bool(self.request("GET", f"/api/sessions/{session_id}")["running"])

    def imported(self, messages: list[tuple[str, str]], **session: Any) -> str:
        """The id of an imported session with these `(role, content)` messages and settings."""
        return str(self.request("POST", "/api/sessions/import", export_of(messages, **session))["id"])


def export_of(messages: list[tuple[str, str]], **session: Any) -> dict[str, Any]:
    """A session export as another KVScope would have written it."""
    now = "2026-01-02T03:04:05.000000+00:00"
    ids = [f"00000000-0000-4000-8000-{index:012d}" for index in range(len(messages))]
    rows = [
        {"id": ids[index], "parent_id": ids[index - 1] if index else None, "role": role, "content": content,
         "token_ids": None, "status": "complete", "finish_reason": "stop" if role == "assistant" else None,
         "error": None, "params": {}, "model": None, "created_at": now}
        for index, (role, content) in enumerate(messages)
    ]  # fmt: skip
    record = {
        "id": "00000000-0000-4000-9000-000000000000", "title": "Imported", "system_prompt": "", "params": {},
        "head_id": ids[-1] if ids else None, "first_kept_id": None, "created_at": now, "updated_at": now,
        "prompt_date": now, **session,
    }  # fmt: skip
    return {"format": "kvscope-session", "version": 1, "session": record, "messages": rows, "turns": []}


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Ask until the answer is true; it."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for: {what}"
        time.sleep(0.05)
    return answer
