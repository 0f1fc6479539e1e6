"""A real run that is cancelled while its trainers still start: no crash, and no peak that looks measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_quickstart import RECIPE, folders, llmlaunch

from support.command_line import CommandLine
from support.node_rig import until

JOB = (RECIPE, f"python={sys.executable}")

pytestmark = pytest.mark.frameworks


def started(run: Path) -> bool:
    return any(path.stat().st_size for path in run.glob("attempts/*/ranks/*.jsonl"))


def no_crash_and_no_peak(home: Path) -> None:
    status = json.loads((home / "run" / "status.json").read_text())
    assert (status["state"], status["cause"]) == ("stopped", None)
    assert status["why"] == "told to stop (SIGTERM) before any step was logged"
    collected = llmlaunch(home, "collect", "run", code=None)
    assert "was told to stop before its first step" in collected.stdout + collected.stderr
    assert json.loads(llmlaunch(home, "measurements", "list", "--json").stdout) == {"measurements": []}


def test_cancel(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`cancel` runs in this process: one that had to start first might come after the first step."""
    for variable, folder in folders(tmp_path).items():
        monkeypatch.setenv(variable, folder)
    here = CommandLine(capsys, monkeypatch)
    llmlaunch(tmp_path, "submit", *JOB, "--local", "-o", "run")
    here("status", tmp_path / "run")  # imports what `cancel` needs
    until(lambda: started(tmp_path / "run"), "the trainers have been started")
    here("cancel", tmp_path / "run")
    until((tmp_path / "run" / "status.json").exists, "the job has ended")
    assert json.loads(llmlaunch(tmp_path, "status", "run", "--json", code=None).stdout)["phase"] == "cancelled"
    no_crash_and_no_peak(tmp_path)


def test_ctrl_c_at_the_script_in_a_terminal(tmp_path: Path) -> None:
    llmlaunch(tmp_path, "render", *JOB, "-o", "run")
    command = ["bash", "run/job.sbatch"]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL) as job:
        until(lambda: started(tmp_path / "run"), "the trainers have been started")
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: to all of the foreground at once
        assert job.wait(240) == 75
    no_crash_and_no_peak(tmp_path)
