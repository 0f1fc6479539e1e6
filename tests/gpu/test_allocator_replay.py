"""The model of torch's caching allocator against the real one: what it says of traced ranks is what torch reserves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 0.01  # of the peak of what is reserved

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of every list of events, setting and size of device, what torch did and what the model says."""
    folder = tmp_path_factory.mktemp("records")
    program = ROOT / "benchmarks" / "gpu" / "allocator_replay.py"
    done = subprocess.run([sys.executable, str(program), str(folder)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (record,) = folder.glob("*.json")
    parts = json.loads(record.read_text())["parts"].values()
    return [row for part in parts for row in part["result"]]


def test_what_is_handed_out_is_the_same_to_the_byte(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["model"]["allocated_bytes"] == row["torch"]["allocated_bytes"], row["events"]


def test_what_is_reserved_agrees_at_the_peak_and_on_the_way(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["reserved_ratio"] == pytest.approx(1.0, abs=TOLERANCE), (row["events"], row["setting"])
        allowed = TOLERANCE * row["torch"]["reserved_bytes"]
        assert row["largest_difference_bytes"] <= allowed, (row["events"], row["setting"])


def test_a_full_device_gives_its_cache_back_as_often(rows: list[dict[str, Any]]) -> None:
    bounded = [row for row in rows if row["device_bytes"] is not None]
    assert bounded
    for row in bounded:
        assert row["model"]["ran_out"] == row["torch"]["ran_out"], row["events"]
        assert row["model"]["retries"] == row["torch"]["retries"], row["events"]
