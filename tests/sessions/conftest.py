from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sessions.store import SessionStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
def store(path: Path) -> Iterator[SessionStore]:
    opened = SessionStore(path)
    yield opened
    opened.close()
