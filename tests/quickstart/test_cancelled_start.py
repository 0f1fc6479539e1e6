"""A real run that is cancelled while its trainers still start: no crash, and no peak that looks measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from test_quickstart import RECIPE, folders, llmlaunch

from support.command_line import CommandLine
from support.node_rig import until

JOB = (RECIPE, f"python={sys.executable}")

pytestmark = pytest.mark.frameworks

TRIES = 3  # to tell the trainers to stop before their first step


def started(run: Path) -> bool:
    return any(path.stat().st_size for path in run.glob("attempts/*/ranks/*.jsonl"))


def came_too_late(home: Path) -> bool:
    """Whether the trainers of a busy machine had made a step before they were told."""
    return "after step" in json.loads((home / "run" / "status.json").read_text())["why"]


def no_crash_and_no_peak(home: Path) -> None:
    status = json.loads((home / "run" / "status.json").read_text())
    assert (status["state"], status["cause"]) == ("stopped", None)
    assert status["why"] == "told to stop (SIGTERM) before any step was logged"
    collected = llmlaunch(home, "collect", "run", code=None)
    assert "was told to stop before its first step" in collected.stdout + collected.stderr
    assert json.loads(llmlaunch(home, "measurements", "list", "--json").stdout) == {"measurements": []}


def test_cancel(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`cancel` runs in this process: one that had to start first might come after the first step."""
    here = CommandLine(capsys, monkeypatch)
    for attempt in range(TRIES):
        home = tmp_path / str(attempt)
        home.mkdir()
        for variable, folder in folders(home).items():
            monkeypatch.setenv(variable, folder)
        llmlaunch(home, "submit", *JOB, "--local", "-o", "run")
        here("status", home / "run")  # imports what `cancel` needs
        until(partial(started, home / "run"), "the trainers have been started")
        here("cancel", home / "run")
        until((home / "run" / "status.json").exists, "the job has ended")
        assert json.loads(llmlaunch(home, "status", "run", "--json", code=None).stdout)["phase"] == "cancelled"
        if not came_too_late(home):
            break
    no_crash_and_no_peak(home)


def test_ctrl_c_at_the_script_in_a_terminal(tmp_path: Path) -> None:
    llmlaunch(tmp_path, "render", *JOB, "-o", "run")
    command = ["bash", "run/job.sbatch"]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL) as job:
        until(lambda: started(tmp_path / "run"), "the trainers have been started")
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: to all of the foreground at once
        assert job.wait(240) == 75
    no_crash_and_no_peak(tmp_path)
