from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmlaunch.store.database import Store, open_store
from llmlaunch.store.location import where


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "store.db")})) as opened:
        yield opened
