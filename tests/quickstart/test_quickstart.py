"""The whole loop on this machine, for real: plan, render, train, measure, collect, compare."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900

pytestmark = pytest.mark.frameworks


def llmlaunch(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = {"XDG_DATA_HOME": "data", "XDG_CACHE_HOME": "cache"}
    environment = {**os.environ, **{name: str(home / folder) for name, folder in places.items()}}
    command = [sys.executable, "-m", "llmlaunch", *words]
    return subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def quickstart(home: Path) -> subprocess.CompletedProcess[str]:
    """What `make quickstart` runs."""
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    return llmlaunch(home, "submit", recipe, "--local", "--follow")


@pytest.fixture(scope="module")
def losses(quickstart: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+/\d+ \| loss ([\d.]+)", quickstart.stdout, re.MULTILINE)]


@pytest.fixture(scope="module")
def recorded(home: Path, quickstart: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    listed = llmlaunch(home, "measurements", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    records: list[dict[str, object]] = json.loads(listed.stdout)["measurements"]
    return records


@pytest.fixture(scope="module")
def measured(recorded: list[dict[str, object]]) -> list[dict[str, object]]:
    """Of the ranks."""
    return [record for record in recorded if "global_rank" in record]


def test_it_succeeds_and_says_so(quickstart: subprocess.CompletedProcess[str]) -> None:
    assert quickstart.returncode == 0, quickstart.stdout + quickstart.stderr
    assert "The run succeeded" in quickstart.stdout


def test_it_trains_for_real_and_the_loss_falls(losses: list[float]) -> None:
    assert len(losses) >= 30
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]


def test_it_ends_with_predicted_against_measured_and_where_the_record_lies(
    home: Path, quickstart: subprocess.CompletedProcess[str]
) -> None:
    tail = quickstart.stdout[quickstart.stdout.index("Memory, predicted against measured") :]
    assert "rank 0" in tail
    assert "rank 1" in tail
    assert re.search(r"^\W*node \S+\W+host\b", tail, re.MULTILINE)
    assert str(home / "data" / "llmlaunch" / "store.db") in tail


def test_both_ranks_have_a_resident_peak_in_the_store(measured: list[dict[str, object]]) -> None:
    assert sorted(record["global_rank"] for record in measured if isinstance(record["global_rank"], int)) == [0, 1]
    for record in measured:
        assert record["peak_kind"] == "resident"
        assert record["gpu"] == "cpu"


def test_the_nodes_main_memory_is_in_the_store(recorded: list[dict[str, object]]) -> None:
    (host,) = [record for record in recorded if record["peak_kind"] == "host"]
    assert isinstance(host["peak_bytes"], int)
    assert isinstance(host["host_memory_bytes"], int)
    assert 0 < host["peak_bytes"] < host["host_memory_bytes"]


def test_the_job_wrote_the_account_of_itself(home: Path, measured: list[dict[str, object]]) -> None:
    (path,) = home.rglob("summary.json")
    account = json.loads(path.read_text())
    assert {rank["rank"]: rank["peak_bytes"] for rank in account["ranks"]} == {
        record["global_rank"]: record["peak_bytes"] for record in measured
    }
    assert account["damaged"] == {}
    assert account["step_seconds"] > 0


def test_the_prediction_is_within_a_fifth_of_the_true_peak(measured: list[dict[str, object]]) -> None:
    for record in measured:
        predicted, peak = record["predicted_bytes"], record["peak_bytes"]
        assert isinstance(predicted, int)
        assert isinstance(peak, int)
        assert abs(predicted / peak - 1) < 0.20, (predicted, peak)


def test_check_then_shows_the_last_true_peak_beside_the_prediction(
    home: Path, quickstart: subprocess.CompletedProcess[str]
) -> None:
    assert quickstart.returncode == 0
    checked = llmlaunch(home, "check", str(ROOT / "recipes" / "quickstart.yaml"))
    assert checked.returncode == 0, checked.stderr
    assert "measured then, predicted then, predicted now" in checked.stdout


def test_runs_lists_it_with_both_figures(home: Path, quickstart: subprocess.CompletedProcess[str]) -> None:
    assert quickstart.returncode == 0
    (run,) = json.loads(llmlaunch(home, "runs", "--json").stdout)["runs"]
    assert run["state"] == "succeeded"
    assert run["predicted_bytes"] > 0
    assert run["measured_bytes"] > 0
