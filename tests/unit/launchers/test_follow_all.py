"""Several runs are followed in one table, to the end of the last."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from local_jobs import wait_until

from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.watch.follow_all import follow_all
from llmlaunch.watch.screen import Screen


class Recorded:
    """A launcher that says of each job one prepared state after the other, and notes each question."""

    name = "slurm"

    def __init__(self, states: dict[str, list[JobState]]) -> None:
        self.left = states
        self.asked: list[list[str]] = []

    def submit(self, run_dir: Path, extra: Sequence[str] = (), again: bool = False) -> Submission:
        raise AssertionError("following submits nothing")

    def states(self, submissions: Iterable[Submission]) -> Mapping[str, JobState]:
        jobs = [submission.job_id for submission in submissions]
        self.asked.append(jobs)
        return {job: self.left[job].pop(0) if len(self.left[job]) > 1 else self.left[job][0] for job in jobs}

    def cancel(self, submission: Submission) -> None:
        raise AssertionError("following cancels nothing")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


WAITS, RUNS = JobState("pending", "PENDING", "Resources"), JobState("running", "RUNNING")
DONE, FAILED = JobState("succeeded", "COMPLETED", "1 node"), JobState("failed", "FAILED", "rank 0 exited with 7")


def run_of(folder: Path, name: str, job: str) -> Submission:
    directory = folder / name
    (directory / "logs").mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"nodes": 1}))
    (directory / "attempts" / f"{job}.0").mkdir(parents=True)
    (directory / "attempts" / f"{job}.0" / "attempt.json").write_text('{"nodes": ["n1"]}')
    (directory / "logs" / f"{job}.0.n1.log").write_text("step 5/40 | loss 3.1234 | 0.50 s/step | 1969 tokens/s\n")
    return Submission("slurm", job, directory, 0.0)


def test_a_line_is_written_when_a_run_s_state_changes(tmp_path: Path) -> None:
    one, two = run_of(tmp_path, "0-a", "11"), run_of(tmp_path, "1-b", "12")
    launcher = Recorded({"11": [WAITS, RUNS, DONE], "12": [RUNS, FAILED]})
    said = io.StringIO()
    states = follow_all(launcher, [one, two], Screen(said), poll_seconds=0.01)
    assert (states["11"], states["12"]) == (DONE, FAILED)
    assert [line for line in said.getvalue().splitlines() if "Attempt" not in line] == [
        "0-a [11] pending: Resources",
        "1-b [12] running",
        "0-a [11] running",
        "1-b [12] failed: rank 0 exited with 7",
        "0-a [11] succeeded: 1 node",
    ]
    assert launcher.asked == [
        ["11", "12"],
        ["11", "12"],
        ["11"],
    ]  # none about those that have ended


def test_on_a_terminal_each_run_has_a_line_in_place(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, "0-a", "11"), run_of(tmp_path, "1-b", "12")]
    screen = Terminal()
    follow_all(Recorded({"11": [RUNS, DONE], "12": [RUNS, DONE]}), runs, Screen(screen), poll_seconds=0.01)
    table = "0-a [11] step 5/40 | loss 3.1234 | 0.5 s/step | 1,969 tokens/s | 18 s left\n1-b [12] step 5/40 "
    assert table in screen.getvalue()


def test_a_run_nobody_knows_does_not_hold_up_the_others(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, "0-a", "11"), run_of(tmp_path, "1-b", "12")]
    launcher = Recorded({"11": [JobState("unknown", reason="no such job")], "12": [RUNS, DONE]})
    states = follow_all(launcher, runs, Screen(io.StringIO()), poll_seconds=0.01, patience_seconds=0.1)
    assert (states["11"].phase, states["12"].phase) == ("unknown", "succeeded")


def test_ctrl_c_ends_the_looking_alone(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, "0-a", "11")]
    said = io.StringIO()

    def press_ctrl_c() -> None:
        wait_until(lambda: "running" in said.getvalue())
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press_ctrl_c)
    presser.start()
    states = follow_all(Recorded({"11": [RUNS]}), runs, Screen(said), poll_seconds=60.0)
    presser.join()
    assert states["11"].phase == "running"
    assert "the jobs go on" in said.getvalue().splitlines()[-1]
