"""A real app process, a real browser, the real default model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

from engine.weights.catalog import ModelSource
from tests.support.app_process import AppProcess
from tests.support.chat_page import Visitor

CHROMIUMS = ("chromium-headless-shell", "chromium", "chromium-browser")
BROWSERS = (*CHROMIUMS, "google-chrome", "google-chrome-stable", "chrome")
# A container may give shared memory too little room for a page's pictures; files in the temporary folder do as well.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
CONTEXT = 4096
"""Tokens of a conversation here: a long chat reaches its limit, and a reply that a test ends is not over before."""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Ends with this folder: while it is open, no other test could run an event loop in this thread."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    required = os.environ.get("KVSCOPE_REQUIRE_BROWSER") == "1"
    if executable is None:
        (pytest.fail if required else pytest.skip)("no Chromium or Chrome on the PATH: install one to test the page")
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        except Error as error:
            (pytest.fail if required else pytest.skip)(f"{executable} does not start: {error.message.splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def folders(
    browser: Browser, default_model: ModelSource, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Path]:
    """Makes data folders that have the default model already. Without a browser nothing is fetched."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("data")
        (folder / "models").mkdir()
        (folder / "models" / default_model.path.name).symlink_to(default_model.path)
        return folder

    return make


@pytest.fixture(scope="package")
def app(folders: Callable[[], Path]) -> Iterator[AppProcess]:
    """One app for the tests that do not end it; each uses sessions of its own."""
    started = AppProcess(folders(), "--max-seq-len", str(CONTEXT), "--allow-fault-injection")
    try:
        yield started.start()
    finally:
        started.stop()
    assert not [line for line in started.output if "ERROR" in line or "Traceback" in line], started.output


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visitor]]:
    """Opens browser profiles; whatever went wrong in one of them fails the test."""
    visitors: list[Visitor] = []

    def make(url: str, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, url, **options))
        return visitors[-1]

    yield make
    for visitor in visitors:
        visitor.close()
    assert not [fault for visitor in visitors for fault in visitor.faults]


@pytest.fixture
def visitor(visit: Callable[..., Visitor], app: AppProcess) -> Visitor:
    return visit(app.url)
