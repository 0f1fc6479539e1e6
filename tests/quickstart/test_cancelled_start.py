"""A run that is cancelled before its first step: no crash, and no peak that looks measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_quickstart import RECIPE, llmlaunch

from support.node_rig import until

pytestmark = pytest.mark.frameworks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A rendered run directory whose trainer only starts, as the real one does while it imports torch."""
    run = tmp_path / "run"
    llmlaunch(tmp_path, "render", RECIPE, f"python={sys.executable}", "-o", run)
    (run / "trainer" / "train.py").write_text("import time\ntime.sleep(600)\n")
    return run


def wait_for_trainers(run: Path) -> None:
    until(
        lambda: any(path.stat().st_size for path in run.glob("attempts/*/ranks/*.jsonl")), "the trainers have started"
    )


def no_crash_and_no_peak(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["cause"]) == ("stopped", None)
    assert status["why"] == "told to stop (SIGTERM) before any step was logged"
    collected = llmlaunch(run.parent, "collect", run, code=None)
    assert "was told to stop before its first step" in collected.stdout + collected.stderr
    assert json.loads(llmlaunch(run.parent, "measurements", "list", "--json").stdout) == {"measurements": []}


def test_cancel_before_the_first_step_is_no_crash(run: Path) -> None:
    llmlaunch(run.parent, "resume", run, "--local")
    wait_for_trainers(run)
    llmlaunch(run.parent, "cancel", run)
    until((run / "status.json").exists, "the job has ended")
    assert json.loads(llmlaunch(run.parent, "status", run, "--json", code=None).stdout)["phase"] == "cancelled"
    no_crash_and_no_peak(run)


def test_ctrl_c_at_the_script_before_the_first_step_is_no_crash(run: Path) -> None:
    command = ["bash", "run/job.sbatch"]
    with subprocess.Popen(command, cwd=run.parent, start_new_session=True, stdout=subprocess.DEVNULL) as script:
        wait_for_trainers(run)
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does: to all of the foreground at once
        assert script.wait(240) == 75
    no_crash_and_no_peak(run)
