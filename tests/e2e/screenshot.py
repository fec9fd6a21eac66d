"""Makes the README's picture: `python -m tests.e2e.screenshot [FILE]` chats three turns and photographs the page."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from app import default_data_dir
from engine.weights.catalog import resolve
from tests.support.app_process import ROOT, AppProcess
from tests.support.chat_page import Visitor

PICTURE = ROOT / "ui" / "static" / "screenshot.png"
TURNS = (
    ("What is a key/value cache? Answer in two sentences.", 90),
    ("Write a short Python function that adds two numbers.", 120),
    ("Name three seas, one per line.", 60),
)
OTHERS = ("Weekend by the sea", "Names for a cat", "Rotary position embedding")


def photograph(app: AppProcess, executable: str, picture: Path) -> None:
    for title in OTHERS:
        app.imported([("user", title), ("assistant", "…")], title=title)
    session = app.session(title="Key/value caches", seed=7, ignore_eos=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
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
        browser.close()


def main() -> None:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        sys.exit("A Chromium or Chrome on the PATH is needed.")
    picture = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    model = resolve(None, default_data_dir())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").mkdir()
        (Path(folder) / "models" / model.path.name).symlink_to(model.path)
        app = AppProcess(Path(folder))
        try:
            photograph(app.start(), executable, picture)
        finally:
            app.stop()


if __name__ == "__main__":
    main()
