"""A run directory that names somebody's job does not get it cancelled: real SLURM, real jobs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster, run_directory, wait_until

pytestmark = pytest.mark.slurm


def hostile_directory(tmp_path: Path, **submission: Any) -> Path:
    tmp_path.mkdir()
    run_dir = run_directory(tmp_path / "hostile", "finish 0")
    record = {"schema": 1, "launcher": "slurm", "submitted_at": time.time(), "cluster": None, **submission}
    (run_dir / "submission.json").write_text(json.dumps(record))
    (run_dir / "run.id").write_text("hostile-1\n")
    return run_dir


def cancel(run_dir: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "llmlaunch", "cancel", str(run_dir)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("held", [False, True], ids=["running", "waiting"])
def test_the_job_of_another_directory_is_not_cancelled(slurm: Cluster, tmp_path: Path, held: bool) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ["--parsable", f"--chdir={elsewhere}", "--output=/dev/null", "--comment=llmlaunch=hostile-12"]
    job = slurm.ask("sbatch", *words, *(["--hold"] if held else []), "--wrap=sleep 600").strip()

    def state() -> str:
        return slurm.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

    wait_until(lambda: state() == ("PENDING" if held else "RUNNING"), "the other's job is in the queue", instead=state)
    before = state()
    for submission in ({"job_id": job}, {"job_id": job, "chain": [job]}, {"job_id": "4000000", "chain": [job]}):
        answer = cancel(hostile_directory(tmp_path / str(time.monotonic_ns()), **submission))
        assert answer.returncode == 2, answer.stderr
        assert f"names job {job}" in answer.stderr
        assert state() == before
    for word in ("--user=root", "--me", f"{job} --full", "-u0"):
        answer = cancel(hostile_directory(tmp_path / str(time.monotonic_ns()), job_id=word))
        assert answer.returncode == 2, answer.stderr
        assert "damaged" in answer.stderr
        assert state() == before
