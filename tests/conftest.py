"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from engine.weights.catalog import ModelSource, resolve


@pytest.fixture(scope="session")
def default_model() -> ModelSource:
    """The default model, fetched on first use into KVSCOPE_TEST_DATA or the user's cache folder."""
    folder = os.environ.get("KVSCOPE_TEST_DATA") or Path.home() / ".cache" / "kvscope-tests"
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Tests run in several processes; one of them fetches, the others wait for it.
    with FileLock(Path(folder) / "fetching.lock"):
        return resolve(None, Path(folder))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests share one app and one browser, so they stay together in one process."""
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.xdist_group("e2e"))
