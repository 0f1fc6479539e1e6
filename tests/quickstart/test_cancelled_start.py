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


def job(home: Path) -> tuple[str | Path, ...]:
    """A trainer that still starts, as one that imports torch does, when it is told to stop."""
    (home / "train.py").write_text("import time\ntime.sleep(600)\n")
    return RECIPE, f"backend={{name: deepspeed, script: {home}/train.py}}", f"python={sys.executable}", "-o", "run"


def wait_for_trainers(run: Path) -> None:
    until(
        lambda: any(path.stat().st_size for path in run.glob("attempts/*/ranks/*.jsonl")), "the trainers have started"
    )


def no_crash_and_no_peak(home: Path) -> None:
    status = json.loads((home / "run" / "status.json").read_text())
    assert (status["state"], status["cause"]) == ("stopped", None)
    assert status["why"] == "told to stop (SIGTERM) before any step was logged"
    collected = llmlaunch(home, "collect", "run", code=None)
    assert "was told to stop before its first step" in collected.stdout + collected.stderr
    assert json.loads(llmlaunch(home, "measurements", "list", "--json").stdout) == {"measurements": []}


def test_cancel_before_the_first_step_is_no_crash(tmp_path: Path) -> None:
    llmlaunch(tmp_path, "submit", *job(tmp_path), "--local")
    wait_for_trainers(tmp_path / "run")
    llmlaunch(tmp_path, "cancel", "run")
    until((tmp_path / "run" / "status.json").exists, "the job has ended")
    assert json.loads(llmlaunch(tmp_path, "status", "run", "--json", code=None).stdout)["phase"] == "cancelled"
    no_crash_and_no_peak(tmp_path)


def test_ctrl_c_at_the_script_before_the_first_step_is_no_crash(tmp_path: Path) -> None:
    llmlaunch(tmp_path, "render", *job(tmp_path))
    command = ["bash", "run/job.sbatch"]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL) as script:
        wait_for_trainers(tmp_path / "run")
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does: to all of the foreground at once
        assert script.wait(240) == 75
    no_crash_and_no_peak(tmp_path)
