"""What an open page costs: how fast a reply streams with the panel or the Debug tab open, and what holds up the page.

    python -m benchmarks.page [--tokens 256] [--context 1024] [--rounds 7] [--long 4000]

Needs `requirements-dev.txt` and a Chromium. `python app.py` runs as a process of its own, a real browser shows it. One
reply is regenerated again and again, greedily and without guesses, so that each round computes the same tokens. A round
has each way of watching once, in another order each time: "closed" is the chat alone, "api" no page at all. CPU time is
that of the app's process, per token; each figure is compared with "closed" of its own round. "Beside" is the CPU time
of all threads but the busiest one, which is the engine's if `OMP_NUM_THREADS=1`: what pages cost, also where other load
makes the engine's own steps slower or faster. At last the longest task of the page's thread is told for a chat of
`--long` tokens, while it streams, is audited and drawn as a map.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from playwright.sync_api import Browser, sync_playwright

from app import default_data_dir
from benchmarks.common import median, print_json, print_table, spread, until
from engine.weights.catalog import resolve
from tests.support.app_process import AppProcess
from tests.support.chat_page import ChatPage, Visitor

BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
CLOSED, PANEL, DEBUG, API = "closed", "panel", "debug", "api"
MODES = (CLOSED, PANEL, DEBUG, API)
SENTENCE = "The tide came in and carried away what the children had built on the shore that day. "
WATCH_TASKS = """() => {
    window.longTasks = [];
    new PerformanceObserver((list) => { for (const entry of list.getEntries()) longTasks.push(entry.duration); })
        .observe({ type: "longtask" });
}"""
Sample = dict[str, float]


@contextmanager
def browser_of() -> Iterator[Browser]:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit("no Chromium or Chrome on the PATH")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@contextmanager
def app_of(options: argparse.Namespace) -> Iterator[AppProcess]:
    """A running app with an empty data folder, the model apart."""
    model = options.model or str(resolve(None, options.data_dir).path)
    with tempfile.TemporaryDirectory() as folder:
        app = AppProcess(Path(folder), "--model", model, "--snapshot-limit", "0").start()
        try:
            yield app
        finally:
            app.stop()


def chat_of(app: AppProcess, context: int, tokens: int) -> str:
    """The id of a chat with about `context` tokens, the last of which are a reply of `tokens`."""
    count = len(app.request("POST", "/tokenize", {"prompt": SENTENCE})["tokens"])
    session_id = app.session(tokens, speculation="off")
    app.say(session_id, SENTENCE * max((context - tokens) // count, 1))
    return session_id


class Watched:
    """One chat of a running app, and the tab that shows it."""

    def __init__(self, app: AppProcess, visitor: Visitor, session_id: str) -> None:
        self.app, self.session_id = app, session_id
        self.process = psutil.Process(app.process.pid)
        self.tab: ChatPage = visitor.open(session_id)
        self.tab.page.evaluate(WATCH_TASKS)

    def look(self, mode: str) -> None:
        """Show the chat alone, the Cache tab or the Debug tab. "api": nothing of the app."""
        if mode == API:
            self.tab.page.goto("about:blank")
            return
        if self.tab.page.url == "about:blank":
            self.tab.go(self.session_id)
        shown = not self.tab.page.evaluate("document.body.classList.contains('kv-no-panel')")
        if shown != (mode != CLOSED):
            self.tab.page.locator("#kv-toggle-panel").click()
        if mode != CLOSED:
            self.tab.tab("Cache" if mode == PANEL else "Debug")
        self.tab.page.wait_for_timeout(500)

    def regenerate(self, mode: str) -> Sample:
        """Tokens per second, and milliseconds of the app's CPU time per token, of one more reply."""
        self.look(mode)
        before = self.cpu_by_thread()
        if mode == API:
            self.app.request("POST", f"/api/sessions/{self.session_id}/regenerate")
        else:
            versions = self.versions()
            self.tab.act(-1, "again")
            self.tab.page.wait_for_function(
                "text => document.querySelector('.versions')?.textContent.trim() !== text", arg=versions
            )
            self.tab.idle()
        took = {thread: seconds - before.get(thread, 0.0) for thread, seconds in self.cpu_by_thread().items()}
        numbers = self.app.numbers(self.session_id)
        ms = 1e3 / numbers["generated_tokens"]
        total, busiest = sum(took.values()), max(took.values())
        return {
            "tokens_per_s": numbers["decode_tokens_per_s"],
            "cpu_ms": ms * total,
            "beside_ms": ms * (total - busiest),
        }

    def cpu_by_thread(self) -> dict[int, float]:
        """Seconds of each thread of the app's process, by its id."""
        return {thread.id: thread.user_time + thread.system_time for thread in self.process.threads()}

    def versions(self) -> str:
        return str(self.tab.page.evaluate("document.querySelector('.versions')?.textContent.trim() ?? ''"))

    def longest_task(self) -> float:
        """Milliseconds since the last call; 0 if none took 50."""
        found = self.tab.page.evaluate("longTasks.splice(0)")
        return max(found, default=0.0)


def rounds_of(watched: Watched, rounds: int) -> Iterator[dict[str, Sample]]:
    watched.regenerate(CLOSED)
    for number in range(rounds):
        order = MODES[number % len(MODES) :] + MODES[: number % len(MODES)]
        found = {mode: watched.regenerate(mode) for mode in order}
        print(
            f"round {number + 1}: "
            + ", ".join(
                f"{mode} {found[mode]['tokens_per_s']:.1f}/s {found[mode]['cpu_ms']:.2f} ms"
                f" ({found[mode]['beside_ms']:.2f} beside)"
                for mode in MODES
            ),
            flush=True,
        )
        yield found


def long_chat(watched: Watched) -> dict[str, float]:
    """The longest task in milliseconds by what was done meanwhile."""
    page = watched.tab.page
    tasks = {}
    for mode in (CLOSED, PANEL, DEBUG):
        watched.look(mode)
        tasks[f"opening {mode}"] = watched.longest_task()
        watched.regenerate(mode)
        tasks[f"a reply, {mode}"] = watched.longest_task()
    section = page.locator("#kv-debug section")
    audit = section.filter(has=page.get_by_role("heading", name="Audit", exact=True))
    audit.get_by_role("button", name="Audit").click()
    audit.get_by_text("hold what the model computes anew").wait_for(timeout=600_000)
    tasks["audit"] = watched.longest_task()
    maps = section.filter(has=page.get_by_role("heading", name="Cache map", exact=True))
    maps.get_by_role("button", name="Draw").click()
    maps.locator("canvas").wait_for(timeout=600_000)
    page.wait_for_timeout(1000)
    tasks["cache map"] = watched.longest_task()
    return tasks


def compared(samples: dict[str, list[Sample]]) -> dict[str, dict[str, float]]:
    """By mode: medians, and medians of the ratios to "closed" in the same round."""
    found = {}
    for mode, taken in samples.items():
        found[mode] = {}
        for name in ("tokens_per_s", "cpu_ms"):
            ratios = [one[name] / base[name] for one, base in zip(taken, samples[CLOSED], strict=True)]
            found[mode] |= {name: median([one[name] for one in taken]), f"{name}_ratio": median(ratios)}
        found[mode]["beside_ms"] = median([one["beside_ms"] for one in taken])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="of a reply")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the chat")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long chat; 0: none")
    parser.add_argument("--model", help="as for app.py; default: the default model")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help="where the model lies or is put")
    parser.add_argument("--limit-s", type=float, help="stop after so many seconds, and tell what was run by then")
    options = parser.parse_args()
    samples: dict[str, list[Sample]] = defaultdict(list)
    tasks: dict[str, float] = {}
    with app_of(options) as app, browser_of() as browser:
        visitor = Visitor(browser, app.url)
        watched = Watched(app, visitor, chat_of(app, options.context, options.tokens))
        for found in until(rounds_of(watched, options.rounds), options.limit_s):
            for mode in MODES:
                samples[mode].append(found[mode])
        if options.long:
            watched = Watched(app, visitor, chat_of(app, options.long, 64))
            tasks = long_chat(watched)
        visitor.close()
    result = compared(samples)
    rows = [
        (
            mode,
            f"{found['tokens_per_s']:.1f}",
            spread([one["tokens_per_s"] for one in samples[mode]]),
            f"{found['tokens_per_s_ratio']:.3f}",
            f"{found['cpu_ms']:.2f}",
            f"{found['cpu_ms_ratio']:.3f}",
            f"{found['beside_ms']:.2f}",
        )
        for mode, found in result.items()
    ]
    print_table(("shown", "tokens/s", "spread", "to closed", "CPU ms/token", "to closed", "beside"), rows)
    print_table(("longest task", "ms"), [(name, f"{ms:.0f}" if ms else "< 50") for name, ms in tasks.items()])
    print_json("page", {"shown": result, "longest_task_ms": tasks, "rounds": len(samples[CLOSED])})


if __name__ == "__main__":
    main()
