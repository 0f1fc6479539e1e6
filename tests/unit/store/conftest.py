from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmlaunch.store.database import Store
from llmlaunch.store.location import where
from llmlaunch.store.open import open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "store.db")})) as opened:
        yield opened
