"""`resume`, `status` and `cancel` of runs on this machine, as a person types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[3] / "wrapper"
JOB = """#!/bin/bash
attempt=local-$(date +%s)-$$.0
mkdir -p "attempts/$attempt"
until [ -e go ]; do sleep 0.05; done
code=$(cat go)
state=failed; [ "$code" != 0 ] || state=succeeded
printf '{"schema": 1, "attempt": "%s", "state": "%s", "exit_code": %d, "why": "said so"}' "$attempt" "$state" "$code" \
  > .status && mv .status status.json
exit "$code"
"""


def llmlaunch(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    argv = [sys.executable, "-m", "llmlaunch", *words]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=180)


def phase(run_dir: Path) -> str:
    return str(json.loads(llmlaunch("status", str(run_dir), "--json").stdout)["phase"])


def wait_for(run_dir: Path, wanted: str) -> None:
    end = time.monotonic() + 120
    while phase(run_dir) != wanted:
        assert time.monotonic() < end, "waited in vain"


def test_from_a_rendered_directory_to_success_in_two_goes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps({"schema": 1, "name": "sample", "nodes": 1}))
    (run_dir / "job.sbatch").write_text(JOB)
    (run_dir / "stop").touch()
    never = llmlaunch("status", str(run_dir))
    assert never.returncode == 2
    assert f"llmlaunch resume {run_dir} does" in never.stderr

    first = llmlaunch("resume", str(run_dir), "--local")
    assert first.returncode == 0, first.stderr
    assert "Removed the stop file" in first.stderr
    running = llmlaunch("resume", str(run_dir))
    assert running.returncode == 2
    assert "is running; when it has ended it can be submitted again" in running.stderr
    options = llmlaunch("status", str(run_dir), str(tmp_path))
    assert options.returncode == 0  # of several the others are shown
    assert "not a run directory" in options.stderr
    assert options.stdout.split("\n")[1].split()[0] == (run_dir / "run.id").read_text().strip()

    (run_dir / "go").write_text("3\n")
    wait_for(run_dir, "failed")
    (run_dir / "go").write_text("0\n")
    again = llmlaunch("resume", str(run_dir), "--json")  # a local run stays one without being told
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout)
    assert told["launcher"] == "local"
    assert len(told["earlier"]) == 1
    wait_for(run_dir, "succeeded")
    assert "nothing is left to do" in llmlaunch("resume", str(run_dir)).stderr
    assert llmlaunch("cancel", str(run_dir), str(tmp_path / "nowhere")).returncode == 2
    sbatch = llmlaunch("resume", str(run_dir), "--anyway", "--", "--partition=x")
    assert sbatch.returncode == 2
    assert "a local run has no sbatch to give them to" in sbatch.stderr
