"""The whole loop on this machine, for real: plan, render, train, measure, collect, compare. It is typed from the
tutorial of the docs, from beginning to end, which shows what llmlaunch prints. `make test` trains fewer steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from support.command_line import data_folders, run_llmlaunch
from support.screens import missing_words
from support.snippets import DOCS, walk
from support.soak import SOAK

RECIPE = asset("recipes", "quickstart.yaml")
STEPS = 10 if SOAK else 5
BEGAN = time.time()

pytestmark = pytest.mark.frameworks


def llmlaunch(home: Path, *words: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    return run_llmlaunch(home, *words, code=code, timeout=900, **folders(home))


def folders(home: Path) -> dict[str, str]:
    """The variables of a home's own store. Homes lie side by side in the session's folder and share a cache, so that an
    idle trainer is measured once for each interpreter."""
    return data_folders(home) | {"XDG_CACHE_HOME": str(home.parent / "cache")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def printed(home: Path) -> dict[str, str]:
    """What the tutorial's pictures show, as printed here."""
    return walk(DOCS / "tutorial.md", home, instead={"training.steps=10": f"training.steps={STEPS}"}, **folders(home))


@pytest.fixture(scope="module")
def submitted(printed: dict[str, str]) -> str:
    """What `submit quickstart.yaml --local --follow` printed."""
    return printed["tutorial-submit"]


@pytest.fixture(scope="module")
def losses(submitted: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+/\d+ \| loss ([\d.]+)", submitted, re.MULTILINE)]


@pytest.fixture(scope="module")
def recorded(home: Path, submitted: str) -> list[dict[str, Any]]:
    return list(json.loads(llmlaunch(home, "measurements", "list", "--json").stdout)["measurements"])


@pytest.fixture(scope="module")
def measured(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the ranks."""
    return [record for record in recorded if "global_rank" in record]


def test_it_succeeds_and_says_so(submitted: str) -> None:
    assert "The run succeeded" in submitted
    extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    built = [path for path in extensions.rglob("*.so") if path.stat().st_mtime >= BEGAN]
    assert not built, "an extension was compiled; nobody is to wait for a compiler"


def test_it_trains_for_real_and_the_loss_falls(losses: list[float]) -> None:
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]


def test_it_ends_with_predicted_against_measured_and_the_path_of_the_store(home: Path, submitted: str) -> None:
    tail = submitted[submitted.index("Memory, predicted against measured") :]
    assert "rank 0" in tail
    assert "rank 1" in tail
    assert re.search(r"^\W*node \S+\W+host\b", tail, re.MULTILINE)
    assert str(home / "data" / "llmlaunch" / "store.db") in tail


def test_both_ranks_have_a_resident_peak_in_the_store(measured: list[dict[str, Any]]) -> None:
    assert sorted(record["global_rank"] for record in measured) == [0, 1]
    for record in measured:
        assert record["peak_kind"] == "resident"
        assert record["gpu"] == "cpu"


def test_the_main_memory_of_the_node_is_in_the_store(recorded: list[dict[str, Any]]) -> None:
    (host,) = [record for record in recorded if record["peak_kind"] == "host"]
    assert 0 < host["peak_bytes"] < host["host_memory_bytes"]


def test_the_job_wrote_its_own_summary(home: Path, measured: list[dict[str, Any]]) -> None:
    (path,) = home.rglob("summary.json")
    account = json.loads(path.read_text())
    assert {rank["rank"]: rank["peak_bytes"] for rank in account["ranks"]} == {
        record["global_rank"]: record["peak_bytes"] for record in measured
    }
    assert account["damaged"] == {}
    assert account["step_seconds"] > 0


def test_the_prediction_is_within_a_fifth_of_the_true_peak(measured: list[dict[str, Any]]) -> None:
    for record in measured:
        predicted, peak = record["predicted_bytes"], record["peak_bytes"]
        assert abs(predicted / peak - 1) < 0.20, (predicted, peak)


def test_check_then_shows_the_last_measured_peak_beside_the_prediction(home: Path, submitted: str) -> None:
    assert "measured then, predicted then, predicted now" in llmlaunch(home, "check", "-v", RECIPE).stdout


def test_runs_lists_it_with_both_figures(home: Path, printed: dict[str, str]) -> None:
    assert "quickstart" in printed["tutorial-runs"]
    (run,) = json.loads(llmlaunch(home, "runs", "--json").stdout)["runs"]
    assert run["state"] == "succeeded"
    assert run["predicted_bytes"] > 0
    assert run["measured_bytes"] > 0


def test_the_pictures_of_the_tutorial_are_current(printed: dict[str, str]) -> None:
    for name in ("tutorial-check", "tutorial-mistake"):
        assert missing_words(name, printed[name]) == set(), f"{name} is old: make docs-screens"
