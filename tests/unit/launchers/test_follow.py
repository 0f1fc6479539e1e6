"""Following shows why a job waits, then its logs as they grow, and ends with the job."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from local_jobs import run_directory, wait_until

from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.logs import JobLogs
from llmlaunch.watch.follow import follow


def test_shows_the_lines_of_a_job_and_its_end(tmp_path: Path) -> None:
    body = "for i in 1 2 3; do echo step $i >> $log; sleep 0.3; done\nprintf 'no newline' >> $log\nfinish 0"
    run_dir = run_directory(tmp_path / "run", body)
    launcher = LocalLauncher()
    submission = launcher.submit(run_dir)
    lines: list[str] = []
    state = follow(run_dir, launcher, submission, lines.append, poll_seconds=0.2)
    assert state.phase == "succeeded"
    assert lines == [f"Job {submission.job_id} is running", "step 1", "step 2", "step 3", "no newline"]


def test_a_job_that_died_before_its_log_is_still_heard(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "sleep 0.5\necho no such python >&2\nfinish 1")
    launcher = LocalLauncher()
    submission = launcher.submit(run_dir)
    lines: list[str] = []
    assert follow(run_dir, launcher, submission, lines.append, poll_seconds=0.2).exit_code == 1
    assert lines[-1] == "no such python"


def test_ctrl_c_ends_the_looking_and_not_the_job(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "echo on >> $log; until [ -e go ]; do sleep 0.05; done\nfinish 0")
    launcher = LocalLauncher()
    submission = launcher.submit(run_dir)
    lines: list[str] = []

    def press_ctrl_c() -> None:
        wait_until(lambda: "on" in lines)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press_ctrl_c)
    presser.start()
    state = follow(run_dir, launcher, submission, lines.append, poll_seconds=60.0)
    presser.join()
    assert state.phase == "running"
    assert "goes on" in lines[-1]
    assert f"llmlaunch logs {run_dir}" in lines[-1]
    assert launcher.states([submission])[submission.job_id].phase == "running"
    (run_dir / "go").touch()
    wait_until(lambda: launcher.states([submission])[submission.job_id].phase == "succeeded")


class Recorded:
    """A launcher that says one prepared state after the other, as SLURM did; the last for ever."""

    name = "slurm"

    def __init__(self, *states: JobState) -> None:
        self.left = list(states)

    def submit(self, run_dir: Path, extra: Sequence[str] = ()) -> Submission:
        raise AssertionError("following submits nothing")

    def states(self, submissions: Iterable[Submission]) -> Mapping[str, JobState]:
        state = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return {submission.job_id: state for submission in submissions}

    def cancel(self, submission: Submission) -> None:
        raise AssertionError("following cancels nothing")


def submission_of(run_dir: Path) -> Submission:
    return Submission("slurm", "12", run_dir, 0.0)


def test_each_reason_is_told_once_and_again_after_a_requeue(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "", nodes=2)
    waiting = JobState("pending", "PENDING", "Resources")
    states = (waiting, waiting, JobState("pending", "PENDING", "Priority"), JobState("running", "RUNNING"), waiting)
    lines: list[str] = []
    launcher = Recorded(*states, JobState("cancelled", "CANCELLED"))
    assert follow(run_dir, launcher, submission_of(run_dir), lines.append, poll_seconds=0.01).phase == "cancelled"
    assert lines == [
        "Job 12 is waiting: Resources",
        "Job 12 is waiting: Priority",
        "Job 12 is running",
        "Job 12 is waiting: Resources",
    ]


def test_a_job_nobody_knows_is_given_up(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "")
    lines: list[str] = []
    state = follow(
        run_dir,
        Recorded(JobState("unknown", reason="SLURM does not know job 12")),
        submission_of(run_dir),
        lines.append,
        poll_seconds=0.01,
        patience_seconds=0.1,
    )
    assert state.phase == "unknown"
    assert lines == ["Job 12 is not known: SLURM does not know job 12"]


def logs_of(tmp_path: Path, nodes: int) -> tuple[Path, JobLogs]:
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"nodes": nodes}))
    return run_dir / "logs", JobLogs(submission_of(run_dir))


def test_several_nodes_are_told_apart(tmp_path: Path) -> None:
    folder, logs = logs_of(tmp_path, nodes=2)
    (folder / "12.0.job.log").write_text("begins\n")
    (folder / "12.0.127.77.0.1.log").write_text("one\n")
    (folder / "12.0.node2.monitor.log").write_text("not the training\n")
    (folder / "120.0.node1.log").write_text("another job\n")
    assert sorted(logs.new_lines()) == ["127.77.0.1: one", "job: begins"]
    (folder / "12.1.node2.log").write_text("after the requeue\n")
    assert logs.new_lines() == ["node2: after the requeue"]
    assert logs.new_lines() == []


def test_a_line_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    folder, logs = logs_of(tmp_path, nodes=1)
    log = folder / "12.0.node1.log"
    log.write_bytes("loss: 4.2 Größ".encode()[:-1])
    assert logs.new_lines() == []
    with log.open("ab") as file:
        file.write("ße\n 10%\r 50%\r100%\r\n".encode())
        file.write(b"\xff\n")
    assert logs.new_lines()[1:] == ["100%", "�"]


def test_a_long_log_is_shown_whole(tmp_path: Path) -> None:
    folder, logs = logs_of(tmp_path, nodes=1)
    lines = [f"step {i} {'x' * 100}" for i in range(30_000)]  # more than one read of 1 MiB
    lines.insert(7, "y" * 3_000_000)  # and a line longer than one
    (folder / "12.0.node1.log").write_text("\n".join(lines))
    assert list(logs.to_end()) == lines
    assert list(logs.to_end()) == []


def test_a_log_begun_again_is_read_from_its_start(tmp_path: Path) -> None:
    folder, logs = logs_of(tmp_path, nodes=1)
    log = folder / "12.0.node1.log"
    log.write_text("a long first line\n")
    logs.new_lines()
    log.write_text("short\n")
    assert logs.new_lines() == ["short"]
