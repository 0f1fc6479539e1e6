"""What a person hears at once when a job is handed in, from stand-ins for SLURM's commands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmlaunch.errors import SchedulerRefused
from llmlaunch.launchers.slurm.commands import SlurmCommands
from llmlaunch.launchers.slurm.launcher import SlurmLauncher

TAKES_IT = "echo 4711"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A stand-in for one of SLURM's commands, before all others on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def write(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)

    return write


def run_directory(folder: Path, **restart: object) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"schema": 1, "restart": restart or None}))
    (folder / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --exclusive --account=proj\n")
    return folder


@pytest.mark.parametrize(
    ("restart", "shown", "warned"),
    [
        ({"by": "requeue", "times": 20}, "JobId=4711 Requeue=0 Restarts=0", True),
        ({"by": "requeue", "times": 20}, "JobId=4711 Requeue=1 Restarts=0", False),
        ({"by": "requeue", "times": 0}, "JobId=4711 Requeue=0 Restarts=0", False),
        ({}, "JobId=4711 Requeue=0 Restarts=0", False),
    ],
)
def test_a_site_that_takes_the_requeue_away_is_named_when_the_job_is_in(
    command: Callable[[str, str], None], tmp_path: Path, restart: dict[str, object], shown: str, warned: bool
) -> None:
    command("sbatch", TAKES_IT)
    command("scontrol", f"echo '{shown}'")
    messages: list[str] = []
    assert SlurmLauncher(say=messages.append).submit(run_directory(tmp_path / "run", **restart)).job_id == "4711"
    assert len(messages) == warned
    assert all("(Requeue=0)" in message and "restart: {by: chain}" in message for message in messages)


def test_a_refusal_ends_with_the_command_that_mends_it(command: Callable[[str, str], None], tmp_path: Path) -> None:
    words = "Batch job submission failed: Invalid qos specification"
    command("sbatch", f'echo "sbatch: error: {words}" >&2; exit 1')
    run = run_directory(tmp_path / "run")
    with pytest.raises(SchedulerRefused) as refusal:
        SlurmLauncher().submit(run)
    assert str(refusal.value) == (
        f"sbatch refused the job: {words}. Name a QoS that you and the partition have (slurm: {{qos: NAME}}). The run "
        f"directory is kept: {run}; submit it later: llmlaunch resume {run} -- --qos=NAME"
    )


def test_a_chain_that_meets_a_limit_of_jobs_keeps_those_that_are_in(
    command: Callable[[str, str], None], tmp_path: Path
) -> None:
    words = "AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS policy"
    command(
        "sbatch",
        f'case "$*" in *4712*) echo "sbatch: error: {words}" >&2; exit 1;; *4711*) echo 4712;; *) echo 4711; esac',
    )
    messages: list[str] = []
    run = run_directory(tmp_path / "run", by="chain", times=3)
    assert SlurmLauncher(say=messages.append).submit(run).jobs == ("4711", "4712")
    (message,) = messages
    assert message.startswith(
        f"2 of 4 jobs of the chain are in, and no more: sbatch refused the job: {words}. You have"
    )
    assert message.endswith(f". When the last of them has ended, llmlaunch resume {run} goes on")
    assert "submit it later" not in message


def test_a_site_without_sacct_is_asked_by_squeue_alone(
    command: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("sbatch", TAKES_IT)
    command("scontrol", "exit 1")
    command("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    run = run_directory(tmp_path / "run")
    submission = SlurmLauncher().submit(run)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    state = SlurmLauncher().states([submission])["4711"]
    assert (state.phase, state.reason) == ("unknown", "SLURM does not know job 4711")
    (run / "attempts" / "4711.0").mkdir(parents=True)
    own = {"schema": 1, "attempt": "4711.0", "state": "succeeded", "exit_code": 0, "why": "all steps are done"}
    (run / "status.json").write_text(json.dumps(own))
    assert SlurmLauncher().states([submission])["4711"].phase == "succeeded"


def test_a_command_that_does_not_end_is_no_answer(command: Callable[[str, str], None]) -> None:
    command("squeue", "echo half; sleep 5 & wait")  # what it started holds its pipe, and is not waited for
    began = time.monotonic()
    answer = SlurmCommands(0.5, 1, print).ask(["squeue"])
    assert (answer.code, answer.output, answer.words) == (None, "", "squeue did not answer in time")
    assert time.monotonic() - began < 4.0
