from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmlaunch.store.database import Store
from llmlaunch.store.location import where
from llmlaunch.store.open import open_store

# rehearsed_plans: ranks of a plan as a rehearsal shows them
sys.path.insert(0, str(Path(__file__).parents[1] / "rehearsal"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "store.db")})) as opened:
        yield opened
