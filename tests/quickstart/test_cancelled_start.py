"""A run that is cancelled before its first step: no crash, and no peak that looks measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_quickstart import RECIPE, folders

from support.command_line import CommandLine
from support.node_rig import until

pytestmark = pytest.mark.frameworks


def test_ctrl_c_at_the_script_before_the_first_step_is_no_crash(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer only starts, as the real one does while it imports torch."""
    for name, value in folders(tmp_path).items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    llmlaunch("render", RECIPE, f"python={sys.executable}", "-o", run)
    (run / "trainer" / "train.py").write_text("import time\ntime.sleep(600)\n")
    command = ["bash", "run/job.sbatch"]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL) as script:
        until(lambda: any(path.stat().st_size for path in run.glob("attempts/*/ranks/*.jsonl")), "the trainers")
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does: to all of the foreground at once
        assert script.wait(240) == 75
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["cause"]) == ("stopped", None)
    assert status["why"] == "told to stop (SIGTERM) before any step was logged"
    collected = llmlaunch("collect", run, code=(0, 1, 2))
    assert "was told to stop before its first step" in collected.stdout + collected.stderr
    assert llmlaunch.json("measurements", "list") == {"measurements": []}
