"""The SLURM launcher against a real SLURM: what it says of a job is what became of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from handmade import WAIT_FOR_GO, jobs_of, run_directory, state, submit, wait_for, write_submission
from one_machine import Cluster, wait_until

from llmlaunch.errors import SchedulerRefused
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_files import cancel_mark, read_submission
from llmlaunch.launchers.run_status import read_statuses
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
from support.command_line import CommandLine

pytestmark = pytest.mark.slurm

UNKNOWN = "4000000"


# What a job does, and what is known of it when it has ended.
ENDS = {
    "finish 0 'all done'": JobState("succeeded", "COMPLETED", "all done", 0),
    "(finish 7 'rank 3 exited with 7')\nexit 0": JobState("failed", "COMPLETED", "rank 3 exited with 7", 7),
    "finish 9 'rank 1 exited with 9'": JobState("failed", "FAILED", "NonZeroExitCode; rank 1 exited with 9", 9),
    "exit 0": JobState("unknown", "COMPLETED", "SLURM says COMPLETED, but job N left no status.json"),
    "exit 5": JobState("failed", "FAILED", "NonZeroExitCode", 5),
}


def test_states_of_many_jobs_come_from_one_question_and_their_own_verdicts(slurm: Cluster, tmp_path: Path) -> None:
    """Exit code 0 alone is no success, and SLURM's COMPLETED does not outweigh a failed rank."""
    ended = {body: submit(run_directory(tmp_path / str(n), body)) for n, body in enumerate(ENDS)}
    held = submit(run_directory(tmp_path / "held", "finish 0"), "--hold")
    unknown = Submission("slurm", UNKNOWN, tmp_path, 1.7e9)

    def states() -> dict[str, JobState]:
        known = SlurmLauncher().states([*ended.values(), held, unknown])
        assert known[held.job_id] == JobState("pending", "PENDING", "JobHeldUser")
        assert known[UNKNOWN] == JobState("unknown", reason=f"SLURM does not know job {UNKNOWN}")
        of_ended = {body: (known[job.job_id], job.job_id) for body, job in ended.items()}
        return {body: replace(state, reason=state.reason.replace(job, "N")) for body, (state, job) in of_ended.items()}

    wait_until(lambda: states() == ENDS, "all have ended", instead=states)
    assert SlurmLauncher().states([]) == {}
    assert read_submission(tmp_path / "0") == ended["finish 0 'all done'"]
    assert (tmp_path / "0" / "run.id").read_text().startswith("sample-")


def test_a_node_silent_at_the_end_of_a_job_keeps_it_completing(slurm: Cluster, tmp_path: Path) -> None:
    submission = submit(run_directory(tmp_path / "run", f"touch began\n{WAIT_FOR_GO}"))
    wait_until((submission.run_dir / "began").exists, "the job runs")
    daemons = slurm.daemons("slurmd")
    for daemon in daemons:
        daemon.suspend()
    try:
        (submission.run_dir / "go").touch()
        wait_until(
            lambda: state(submission).state == "COMPLETING", "SLURM clears up", instead=lambda: state(submission)
        )
        (look,) = read_statuses([submission], lambda line: None)
        assert look.state.phase == "running"
        assert "ended; SLURM waits for word from every node" in look.sentence()
    finally:
        for daemon in daemons:
            daemon.resume()
    wait_for(submission, "succeeded")


def test_cancel_leaves_a_finished_job_alone(slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path) -> None:
    submission = submit(run_directory(tmp_path / "run", "finish 0"))
    wait_for(submission, "succeeded")
    assert SlurmLauncher().cancel(submission) is False
    assert not cancel_mark(submission).exists()
    said = llmlaunch("cancel", submission.run_dir).stderr
    assert "has already finished (succeeded); nothing was cancelled" in said
    assert "told" not in said


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--partition=nope"], "invalid partition specified: nope"),
        (["--nodes=100"], "More processors requested than permitted"),
        (["--gpus-per-node=9"], "Requested node configuration is not available"),
        (["--no-such-option"], "unrecognized option"),
    ],
)
def test_a_refusal_quotes_sbatch(slurm: Cluster, tmp_path: Path, extra: Sequence[str], words: str) -> None:
    run_dir = run_directory(tmp_path / "run", "finish 0")
    with pytest.raises(SchedulerRefused, match="sbatch refused the job") as refusal:
        submit(run_dir, *extra)
    assert words in str(refusal.value)
    assert str(run_dir) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.exit_code == 4
    assert (run_dir / "job.sbatch").exists()
    assert read_submission(run_dir) is None
    wait_for(submit(run_dir), "succeeded")  # mended, it may be submitted again


def test_sbatch_variables_do_not_override_the_script(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "SBATCH_JOB_NAME": "other",
        "SBATCH_PARTITION": "debug",
        "SBATCH_OPEN_MODE": "truncate",
        "SQUEUE_FORMAT": "%j",
        "SQUEUE_STATES": "COMPLETED",
    }.items():
        monkeypatch.setenv(name, value)
    submission = submit(run_directory(tmp_path / "run", WAIT_FOR_GO), "--hold")
    assert state(submission).phase == "pending"
    shown = slurm.ask("squeue", "-h", "-t", "all", "-j", submission.job_id, "-o", "%j %P")
    assert shown == "sample debug\n"  # the script names no partition: the site's default may


@pytest.mark.parametrize("held", [False, True], ids=["running", "waiting"])
def test_a_forged_job_id_cancels_nobody_s_job(
    slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path, held: bool
) -> None:
    """A run directory that names somebody's job does not get it cancelled."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ["--parsable", f"--chdir={elsewhere}", "--output=/dev/null", "--comment=llmlaunch=hostile-12"]
    job = slurm.ask("sbatch", *words, *(["--hold"] if held else []), "--wrap=sleep 600").strip()

    def in_queue() -> str:
        return slurm.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

    wait_until(lambda: in_queue() == ("PENDING" if held else "RUNNING"), "it is in the queue", instead=in_queue)
    before = in_queue()
    run_dir = run_directory(tmp_path / "hostile", "finish 0")
    (run_dir / "run.id").write_text("hostile-1\n")
    named: list[tuple[str, list[str] | None]] = [(job, None), (job, [job]), (UNKNOWN, [job])]
    damaged = ("--user=root", "--me", f"{job} --full", "-u0")
    for (job_id, chain), refusal in [
        *((each, f"names job {job}") for each in named),
        *(((words, None), "damaged") for words in damaged),
    ]:
        write_submission(run_dir, job_id, submitted_at=time.time(), **({"chain": chain} if chain else {}))
        assert refusal in llmlaunch("cancel", run_dir, code=2).stderr
        assert in_queue() == before


def test_a_controller_that_answers_late_gets_the_job_once(alone: Cluster, tmp_path: Path) -> None:
    """sbatch gives up and exits 1, and the job is in the queue: seen with 22.05.8."""
    controller = alone.pid("slurmctld")
    os.kill(controller, signal.SIGSTOP)
    wake = threading.Timer(12.0, os.kill, (controller, signal.SIGCONT))
    wake.start()
    submission = submit(run_directory(tmp_path / "run", "finish 0"))
    wake.join()
    wait_for(submission, "succeeded")
    assert jobs_of(alone, tmp_path / "run") == [submission.job_id]


def test_a_controller_that_is_down_is_reported_plainly(alone: Cluster, tmp_path: Path) -> None:
    ended = submit(run_directory(tmp_path / "ended", "finish 6 'rank 0 exited with 6'"))
    wait_for(ended, "failed")
    running = submit(run_directory(tmp_path / "running", WAIT_FOR_GO))
    wait_for(running, "running")
    alone.kill("slurmctld")
    run_dir = run_directory(tmp_path / "run", "finish 0")
    with pytest.raises(SchedulerRefused, match="Unable to contact slurm controller"):
        SlurmLauncher(tries=1).submit(run_dir)
    assert not (run_dir / "submitting").exists()  # it was not heard
    assert read_submission(run_dir) is None
    # squeue is silent; what `sacct -c` and the job's own last word tell is told.
    states = SlurmLauncher(tries=1).states([ended, running])
    assert states[ended.job_id].phase == "failed"
    assert states[ended.job_id].exit_code == 6
    assert states[running.job_id].phase == "unknown"
    assert "Unable to contact slurm controller" in states[running.job_id].reason
