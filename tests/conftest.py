"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# As in the app: torch's threads must not spin while they wait. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

# Triton decides when it is first imported whether kernels are compiled or interpreted; without a card they can only be
# interpreted.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from filelock import FileLock

from engine.weights.catalog import ModelSource, resolve

IN_ONE_PROCESS = ("tests/e2e/",)
"""Tests that start apps: two at a time would share the processor, and a page that has to wait is not what they test."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` (pytest-xdist) a file's tests stay together, and those that start apps are in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "apps" if file.startswith(IN_ONE_PROCESS) else file

    return ByFile(config, log)


@pytest.fixture(scope="session")
def default_model() -> ModelSource:
    """The default model, fetched on first use into KVSCOPE_TEST_DATA or the user's cache folder."""
    folder = Path(os.environ.get("KVSCOPE_TEST_DATA") or Path.home() / ".cache" / "kvscope-tests")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "fetching.lock"):
        return resolve(None, folder)
