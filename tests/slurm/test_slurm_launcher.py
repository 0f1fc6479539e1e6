"""The SLURM launcher against a real SLURM: what it says of a job is what became of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from handmade import WAIT_FOR_GO, Output, phases, run_directory, state, submit, wait_for, write_submission
from one_machine import Cluster, wait_until

from llmlaunch.errors import SchedulerRefused
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_files import cancel_mark, read_submission
from llmlaunch.launchers.run_status import read_statuses
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
from llmlaunch.watch.follow import follow
from llmlaunch.watch.screen import Screen
from support.command_line import CommandLine

pytestmark = pytest.mark.slurm

UNKNOWN = "4000000"


def test_success_is_the_job_s_own_word(slurm: Cluster, tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "finish 0 'all done'")
    submission = submit(run_dir)
    assert wait_for(submission, "succeeded") == JobState("succeeded", "COMPLETED", "all done", 0)
    assert read_submission(run_dir) == submission
    assert submission.launcher == "slurm"
    assert (run_dir / "run.id").read_text().startswith("sample-")


def test_exit_code_0_alone_is_no_success(slurm: Cluster, tmp_path: Path) -> None:
    submission = submit(run_directory(tmp_path / "run", "exit 0"))
    wait_until(lambda: state(submission).state == "COMPLETED", "SLURM says COMPLETED")
    assert state(submission).phase == "unknown"
    assert "left no status.json" in state(submission).reason


def test_slurm_s_completed_does_not_outweigh_a_failed_rank(slurm: Cluster, tmp_path: Path) -> None:
    submission = submit(run_directory(tmp_path / "run", "(finish 7 'rank 3 exited with 7')\nexit 0"))
    assert wait_for(submission, "failed") == JobState("failed", "COMPLETED", "rank 3 exited with 7", 7)


def test_failure_tells_code_and_reason(slurm: Cluster, tmp_path: Path) -> None:
    submission = submit(run_directory(tmp_path / "run", "finish 9 'rank 1 exited with 9'"))
    failed = wait_for(submission, "failed")
    assert failed == JobState("failed", "FAILED", "NonZeroExitCode; rank 1 exited with 9", 9)


def test_failure_without_a_last_word_still_tells_the_code(slurm: Cluster, tmp_path: Path) -> None:
    submission = submit(run_directory(tmp_path / "run", "exit 5"))
    wait_for(submission, "failed")
    wait_until(lambda: state(submission).exit_code == 5, "sacct -c knows the exit code")


def test_pending_tells_the_reason_then_runs(slurm: Cluster, tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", WAIT_FOR_GO)
    submission = submit(run_dir, "--hold")
    assert wait_for(submission, "pending") == JobState("pending", "PENDING", "JobHeldUser")
    slurm.ask("scontrol", "release", submission.job_id)
    assert wait_for(submission, "running").state == "RUNNING"
    (run_dir / "go").touch()
    wait_for(submission, "succeeded")


def test_a_node_that_is_silent_when_the_job_ends_keeps_it_for_a_while(slurm: Cluster, tmp_path: Path) -> None:
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


def test_cancel(slurm: Cluster, tmp_path: Path) -> None:
    submission = submit(run_directory(tmp_path / "run", WAIT_FOR_GO))
    wait_for(submission, "running")
    assert SlurmLauncher().cancel(submission) is True
    assert wait_for(submission, "cancelled", "failed").state == "CANCELLED"
    assert SlurmLauncher().cancel(submission) is False  # an ended job is left alone


def test_a_job_that_has_succeeded_is_not_told_to_stop(slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path) -> None:
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
def test_a_refusal_is_told_in_sbatch_s_own_words(
    slurm: Cluster, tmp_path: Path, extra: Sequence[str], words: str
) -> None:
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


def test_an_unknown_job_is_unknown_and_not_failed(slurm: Cluster, tmp_path: Path) -> None:
    unknown = Submission("slurm", UNKNOWN, tmp_path, 1.7e9)
    assert state(unknown) == JobState("unknown", reason=f"SLURM does not know job {UNKNOWN}")


def test_many_jobs_are_asked_for_at_once(slurm: Cluster, tmp_path: Path) -> None:
    good = [submit(run_directory(tmp_path / f"good{i}", "finish 0")) for i in range(5)]
    bad = submit(run_directory(tmp_path / "bad", "finish 3"))
    held = submit(run_directory(tmp_path / "held", "finish 0"), "--hold")
    every = [*good, bad, held, Submission("slurm", UNKNOWN, tmp_path, 1.7e9)]
    wait_until(lambda: phases(every) == [*["succeeded"] * 5, "failed", "pending", "unknown"], "all have ended")
    assert SlurmLauncher().states([]) == {}


def test_the_environment_does_not_override_the_script(
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


def test_node_ranks_follow_slurm_s_order(slurm: Cluster, tmp_path: Path) -> None:
    """node10 and node11 come after node9, and rank 0 sits where MASTER_ADDR points."""
    body = (
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        'echo "$MASTER_ADDR" > master\n'
        "srun bash -c 'echo $SLURM_NODEID $SLURMD_NODENAME $(hostname)' > ranks\n"
        "finish $?"
    )
    run_dir = run_directory(tmp_path / "run", body, nodes=11)
    submission = submit(run_dir)
    assert wait_for(submission, "succeeded", "failed").phase == "succeeded"
    ranks = {int(line.split()[0]): line.split()[1] for line in (run_dir / "ranks").read_text().splitlines()}
    assert [ranks[rank] for rank in range(11)] == slurm.nodes
    assert slurm.nodes[8:] in (["node9", "node10", "node11"], ["127.77.0.9", "127.77.0.10", "127.77.0.11"])
    assert (run_dir / "master").read_text().strip() == ranks[0]


def test_follow_from_the_queue_to_the_end(slurm: Cluster, tmp_path: Path) -> None:
    body = "srun --output=logs/$attempt.%N.log bash -c 'echo rank $SLURM_NODEID'\nfinish $?"
    run_dir = run_directory(tmp_path / "run", body, nodes=2)
    submission = submit(run_dir, "--hold")

    def release(text: str) -> None:
        if "JobHeldUser" in text:
            slurm.ask("scontrol", "release", submission.job_id)

    output = Output(release)
    assert follow(submission, Screen(output), raw=True, poll_seconds=0.5).phase == "succeeded"
    lines = output.getvalue().splitlines()
    assert lines[0].startswith(f"Job {submission.job_id} is waiting: JobHeldUser (it is held until somebody types")
    names = (path.name.removeprefix(f"{submission.job_id}.0.") for path in (run_dir / "logs").glob("*.log"))
    first, second = sorted(name.removesuffix(".log") for name in names if name != "job.log")
    assert {f"{first}: rank 0", f"{second}: rank 1"} <= set(lines)


def test_a_requeued_job_is_followed_into_its_next_attempt(slurm: Cluster, tmp_path: Path) -> None:
    body = "echo attempt $attempt\n[ ${SLURM_RESTART_COUNT:-0} = 0 ] && sleep 600\nfinish 0"
    run_dir = run_directory(tmp_path / "run", body)
    submission = submit(run_dir)

    def requeue(text: str) -> None:
        if text == f"attempt {submission.job_id}.0\n":
            slurm.ask("scontrol", "requeue", submission.job_id)

    output = Output(requeue)
    assert follow(submission, Screen(output), raw=True, poll_seconds=0.5).phase == "succeeded"
    lines = output.getvalue().splitlines()
    assert lines.index(f"attempt {submission.job_id}.0") < lines.index(f"attempt {submission.job_id}.1")


@pytest.mark.parametrize("held", [False, True], ids=["running", "waiting"])
def test_the_job_of_another_directory_is_not_cancelled(
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


def test_a_controller_that_answers_late_has_taken_the_job_once(alone: Cluster, tmp_path: Path) -> None:
    """sbatch gives up and exits 1, and the job is in the queue: seen with 22.05.8."""
    controller = alone.pid("slurmctld")
    os.kill(controller, signal.SIGSTOP)
    wake = threading.Timer(12.0, os.kill, (controller, signal.SIGCONT))
    wake.start()
    submission = submit(run_directory(tmp_path / "run", "finish 0"))
    wake.join()
    wait_for(submission, "succeeded")
    assert alone.ask("squeue", "-h", "-t", "all", "-o", "%i").split() == [submission.job_id]


def test_a_controller_that_is_down_is_said_plainly(alone: Cluster, tmp_path: Path) -> None:
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
