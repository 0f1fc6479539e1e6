from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1]
sys.path.insert(0, str(UNIT / "store"))  # store_run_dirs: run directories made by hand

from llmlaunch.store.database import Store  # noqa: E402
from llmlaunch.store.location import where  # noqa: E402
from llmlaunch.store.open import open_store  # noqa: E402


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "store.db")})) as opened:
        yield opened
