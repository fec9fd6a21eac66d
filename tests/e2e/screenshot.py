"""Makes the README's pictures: `python -m tests.e2e.screenshot [FOLDER]` chats three turns and photographs the page;
then a reply that repeats itself is diagnosed and cured."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from app import default_data_dir
from engine.weights.catalog import resolve
from tests.support.app_process import ROOT, AppProcess
from tests.support.chat_page import Visitor

PICTURES = ROOT / "ui" / "static"
TURNS = (
    ("What is a key/value cache? Answer in two sentences.", 90),
    ("Write a short Python function that adds two numbers.", 120),
    ("Name three seas, one per line.", 60),
)
OTHERS = ("Weekend by the sea", "Names for a cat", "Rotary position embedding")
CHAT_AND_PANEL: Any = {"x": 264, "y": 0, "width": 1176, "height": 900}
LOOPING = "List fifty synonyms of good."


def photograph(app: AppProcess, browser: Browser, picture: Path) -> None:
    for title in OTHERS:
        app.imported([("user", title), ("assistant", "…")], title=title)
    session = app.session(title="Key/value caches", seed=7, ignore_eos=False)
    visitor = Visitor(browser, app.url, color_scheme="light")
    tab = visitor.open(session)
    for text, most in TURNS:
        params = {"max_tokens": most, "temperature": 0.0, "seed": 7}
        app.request("PATCH", f"/api/sessions/{session}", {"params": params})
        tab.ask(text)
    tab.page.wait_for_timeout(2500)
    tab.page.mouse.move(1, 1)
    tab.page.screenshot(path=picture)
    visitor.close()


def photograph_loop(app: AppProcess, browser: Browser, diagnosed: Path, cured: Path) -> None:
    """The verdict with its evidence, and the page after its cure was applied with one click."""
    visitor = Visitor(browser, app.url, color_scheme="light")
    tab = visitor.open(app.session(title="Synonyms of good", max_tokens=90, seed=7, ignore_eos=False))
    tab.ask(LOOPING)
    tab.thread.locator(".loop-note").click()
    why = tab.page.locator("#kv-debug section").first
    why.get_by_role("button", name="Diagnose").click()
    why.locator(".verdict").wait_for()
    tab.page.mouse.move(1, 1)
    tab.page.wait_for_timeout(500)
    tab.page.screenshot(path=diagnosed, clip=CHAT_AND_PANEL)
    why.get_by_role("button", name="Apply and regenerate").click()
    tab.page.locator(".versions").wait_for()
    tab.idle(2)
    tab.page.locator("#kv-debug .strip .token").nth(12).click()
    tab.page.locator(".others .taken").wait_for()
    tab.page.mouse.move(1, 1)
    tab.page.wait_for_timeout(2500)
    tab.page.screenshot(path=cured, clip=CHAT_AND_PANEL)
    visitor.close()


def main() -> None:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        sys.exit("A Chromium or Chrome on the PATH is needed.")
    pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    model = resolve(None, default_data_dir())
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        (Path(folder) / "models").mkdir()
        (Path(folder) / "models" / model.path.name).symlink_to(model.path)
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        app = AppProcess(Path(folder))
        try:
            photograph(app.start(), browser, pictures / "screenshot.png")
            photograph_loop(app, browser, pictures / "loop.png", pictures / "cure.png")
        finally:
            browser.close()
            app.stop()


if __name__ == "__main__":
    main()
