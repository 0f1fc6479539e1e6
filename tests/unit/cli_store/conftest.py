from __future__ import annotations

import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1]
sys.path.insert(0, str(UNIT / "store"))  # store_run_dirs: run directories made by hand
sys.path.insert(0, str(UNIT / "calibration"))  # measured_runs: records made by hand
sys.path.insert(0, str(UNIT / "rehearsal"))  # rehearsed_plans: ranks of a plan as a rehearsal shows them

from calibrating import Cli  # noqa: E402


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(tmp_path, capsys, monkeypatch)
