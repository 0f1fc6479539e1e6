from __future__ import annotations

from pathlib import Path

import pytest
from calibrating import StoreCommandLine


@pytest.fixture
def llmlaunch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> StoreCommandLine:
    return StoreCommandLine(capsys, monkeypatch)


@pytest.fixture
def store_file(own_home: Path) -> Path:
    return own_home / "data" / "llmlaunch" / "store.db"
