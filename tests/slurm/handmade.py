"""Run directories made by hand, and what the launcher in this process says of their jobs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from one_machine import Cluster, wait_until

from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.slurm.launcher import SlurmLauncher

WAIT_FOR_GO = "until [ -e go ]; do sleep 0.1; done\nfinish 0"
# What every job.sbatch does around its training: a name for the attempt, a log, a last word.
_FRAME = """#!/bin/bash
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --job-name=sample
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
attempt=$job.${{SLURM_RESTART_COUNT:-0}}
mkdir -p "attempts/$attempt"
exec >> "logs/$attempt.job.log" 2>&1
finish() {{
  state=failed
  [ "$1" != 0 ] || state=succeeded
  printf '{{"schema": 1, "attempt": "%s", "state": "%s", "exit_code": %d, "nodes": [], "ranks": [], "ended_at": 1,
    "why": "%s"}}' "$attempt" "$state" "$1" "$2" > .status && mv .status status.json
  exit "$1"
}}
"""


def run_directory(path: Path, body: str, nodes: int = 1) -> Path:
    """A run directory whose job.sbatch runs `body`, which ends with `finish CODE [WHY]`."""
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"schema": 1, "name": "sample", "nodes": nodes}))
    (path / "job.sbatch").write_text(_FRAME.format(nodes=nodes) + body)
    return path


def write_submission(run_dir: Path, job_id: str, **fields: object) -> None:
    """Write the record of a job that was submitted long ago."""
    record = {"schema": 1, "launcher": "slurm", "job_id": job_id, "submitted_at": 1.7e9, "cluster": None, **fields}
    (run_dir / "submission.json").write_text(json.dumps(record))


def submit(run_dir: Path, *extra: str) -> Submission:
    return SlurmLauncher().submit(run_dir, extra)


def state(submission: Submission) -> JobState:
    return SlurmLauncher().states([submission])[submission.job_id]


def jobs_of(cluster: Cluster, run_dir: Path) -> list[str]:
    """Every job that works in the directory, ended ones too, by id."""
    rows = cluster.ask("squeue", "-h", "-t", "all", "-o", "%F %Z").splitlines()
    return sorted((row.split()[0] for row in rows if row.split(" ", 1)[1] == str(run_dir)), key=int)


def phases(submissions: Sequence[Submission]) -> list[str]:
    states = SlurmLauncher().states(submissions)
    return [states[submission.job_id].phase for submission in submissions]


def wait_for(submission: Submission, *wanted: str) -> JobState:
    """Return the first state in a wanted phase: asked again, the next job of a chain may have begun."""
    states: list[JobState] = []

    def reached() -> bool:
        states.append(state(submission))
        return states[-1].phase in wanted

    wait_until(reached, f"the job is {' or '.join(wanted)}", instead=lambda: states[-1])
    return states[-1]


class Output(io.StringIO):
    """Keeps what is written, and calls back with each text."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__()
        self.hear = hear

    def write(self, text: str) -> int:
        self.hear(text)
        return super().write(text)
