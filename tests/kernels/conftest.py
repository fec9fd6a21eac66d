"""Fixtures for tests of kernels."""

from __future__ import annotations

import pytest

from tests.support import interpreter


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Only where kernels are interpreted."""
    if interpreter.is_interpreting():
        interpreter.call_device_functions_directly()
