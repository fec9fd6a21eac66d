"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

# As in the app: torch's threads must not spin while they wait. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

# Triton decides when it is first imported whether kernels are compiled or interpreted; without a card they can only be
# interpreted.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from engine.weights.catalog import ModelSource, resolve


@pytest.fixture(scope="session")
def default_model() -> ModelSource:
    """The default model, fetched on first use into KVSCOPE_TEST_DATA or the user's cache folder."""
    folder = os.environ.get("KVSCOPE_TEST_DATA") or Path.home() / ".cache" / "kvscope-tests"
    return resolve(None, Path(folder))
