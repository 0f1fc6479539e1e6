from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    """An empty store of the test's own."""
    from llmlaunch.store.database import open_store  # most tests need no database
    from llmlaunch.store.location import where

    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "store.db")})) as opened:
        yield opened


@pytest.fixture
def store_file(own_home: Path) -> Path:
    """Where the store of the person is, unless a variable says otherwise."""
    return own_home / "data" / "llmlaunch" / "store.db"
