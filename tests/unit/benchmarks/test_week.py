"""A part of the simulated week of `make soak` on eight nodes, with a stop every quarter of an hour: the rendered script
and the real node.pyz bring the training back after every one, and all that the simulator checks holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MINUTES = 85
KINDS = {"crash", "node loss", "hang"}  # the first of those that come in turn


def test_a_training_comes_back_after_every_stop_and_loses_no_more_than_a_save_interval(tmp_path: Path) -> None:
    often = ["--each-minutes", "15", "--save-minutes", "10", "--seed", "3"]
    words = ["--nodes", "8", "--days", str(MINUTES / 24 / 60), *often, "--json", str(tmp_path / "week.json")]
    command = [sys.executable, str(ROOT / "benchmarks/week"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    week = json.loads((tmp_path / "week.json").read_text())
    assert {kind for kind, stops in week["stops"].items() if stops} >= KINDS
    assert week["violations"] == []
    assert week["attempts"] > len(KINDS)
    assert 0.3 < week["goodput"] < 0.9
