"""`resume`, `status` and `cancel` of runs on this machine, as a person types them."""

from __future__ import annotations

import json
import time
from pathlib import Path

from support.command_line import CommandLine

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


def wait_for(llmlaunch: CommandLine, run_dir: Path, phase: str) -> None:
    end = time.monotonic() + 120
    while llmlaunch.json("status", run_dir)["phase"] != phase:
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_from_a_rendered_directory_to_success_in_two_goes(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps({"schema": 1, "name": "sample", "nodes": 1}))
    (run_dir / "job.sbatch").write_text(JOB)
    (run_dir / "stop").touch()
    never = llmlaunch("status", run_dir, code=2)
    assert f"llmlaunch resume {run_dir} does" in never.stderr

    first = llmlaunch("resume", run_dir, "--local")
    assert "Removed the stop file" in first.stderr
    running = llmlaunch("resume", run_dir, code=2)
    assert "is running; when it has ended it can be submitted again" in running.stderr
    options = llmlaunch("status", run_dir, tmp_path)  # of several the others are shown
    assert "not a run directory" in options.stderr
    assert options.stdout.split("\n")[1].split()[0] == (run_dir / "run.id").read_text().strip()

    (run_dir / "go").write_text("3\n")
    wait_for(llmlaunch, run_dir, "failed")
    (run_dir / "go").write_text("0\n")
    again = json.loads(llmlaunch("resume", run_dir, "--json").stdout)
    assert again["launcher"] == "local"  # without being asked for it again
    assert len(again["earlier"]) == 1
    wait_for(llmlaunch, run_dir, "succeeded")
    assert "nothing is left to do" in llmlaunch("resume", run_dir, code=(0, 2)).stderr
    llmlaunch("cancel", run_dir, tmp_path / "nowhere", code=2)
    sbatch = llmlaunch("resume", run_dir, "--anyway", "--", "--partition=x", code=2)
    assert "a local run has no sbatch to give them to" in sbatch.stderr
