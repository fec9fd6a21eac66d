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
from hypothesis import HealthCheck, settings

from engine.weights.catalog import ModelSource, resolve
from kernels.cpu import kept
from kernels.dispatch import cpu_kernels

# How long an example takes is the machine's business. Tests look for new examples each time, except in the gate: there
# a failure must come from what was changed.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("search"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "search"))

IN_ONE_PROCESS = ("tests/e2e/", "tests/kernels/test_gpu_codegen.py")
"""Tests that start apps: two at a time would share the processor, and a page that has to wait is not what they test.
Then what compiles beside them: the first process begins it, and is given these tests."""
LONGEST = (
    "one process",
    "tests/engine/test_greedy_is_transformers.py",
    "tests/contract/test_command_line.py",
)
"""Begun first, the longest at the head: a long one at the end has one process wait for the other."""


def pytest_configure() -> None:
    """Compile the CPU kernels before there are several processes, each of which would; the apps of tests too."""
    # What tests ask of a server of their own goes past any proxy that the machine has.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
    if not kept.is_complete():
        cpu_kernels()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` (pytest-xdist) a file's tests stay together, and those that start apps are in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "one process" if file.startswith(IN_ONE_PROCESS) else file

        def _assign_work_unit(self, node: Any) -> None:
            longest = next((scope for scope in LONGEST if scope in self.workqueue), None)
            if longest is not None:
                self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)


@pytest.fixture(scope="session")
def default_model() -> ModelSource:
    """The default model, fetched on first use into KVSCOPE_TEST_DATA or the user's cache folder."""
    folder = Path(os.environ.get("KVSCOPE_TEST_DATA") or Path.home() / ".cache" / "kvscope-tests")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "fetching.lock"):
        return resolve(None, folder)
