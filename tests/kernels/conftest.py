"""Fixtures for tests of kernels."""

from __future__ import annotations

import os

import pytest

from tests.support import codegen_child, interpreter


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is asked for at the end of the kernels' tests is begun at once, by the first of several processes, which
    is the one that asks (`IN_ONE_PROCESS`)."""
    asked = any(item.path.name == "test_gpu_codegen.py" for item in session.items)
    if asked and not session.config.option.collectonly and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        codegen_child.start()


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Only where kernels are interpreted."""
    if interpreter.is_interpreting():
        interpreter.call_device_functions_directly()
