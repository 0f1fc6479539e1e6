"""Following shows why runs wait, then their steps or log lines as they grow, and ends with the last run."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from watched_run import TerminalStream, append, write

from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.run_status import RunStatus
from llmlaunch.watch.follow import follow, follow_several
from llmlaunch.watch.screen import Screen
from support.local_jobs import run_directory, wait_until

WAITS, RUNS = JobState("pending", "PENDING", "Resources"), JobState("running", "RUNNING")
DONE, FAILED = JobState("succeeded", "COMPLETED", "1 node"), JobState("failed", "FAILED", "rank 0 exited with 7")
UNKNOWN = JobState("unknown", reason="SLURM does not know job 12")


class Recorded:
    """Answers for each job one prepared state after the other, the last for ever, and notes each question."""

    def __init__(self, **states: list[JobState]) -> None:
        self.left = {job.removeprefix("job"): states for job, states in states.items()}
        self.questions: list[list[str]] = []

    def __call__(self, submissions: Sequence[Submission], say: Callable[[str], None]) -> list[RunStatus]:
        self.questions.append([submission.job_id for submission in submissions])
        return [RunStatus(s, self._next(s.job_id), None, {}, {}, stopping=False) for s in submissions]

    def _next(self, job: str) -> JobState:
        return self.left[job].pop(0) if len(self.left[job]) > 1 else self.left[job][0]


def slurm_job(folder: Path) -> Submission:
    return Submission("slurm", "12", run_directory(folder / "run", ""), 0.0)


def when_written(stream: io.StringIO, text: str) -> threading.Thread:
    """Presses Ctrl-C when the text has been written."""

    def press_ctrl_c() -> None:
        wait_until(lambda: text in stream.getvalue())
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press_ctrl_c)
    presser.start()
    return presser


def test_shows_the_lines_of_a_job_and_its_end(tmp_path: Path) -> None:
    body = "for i in 1 2 3; do echo step $i >> $log; sleep 0.3; done\nprintf 'no newline' >> $log\nfinish 0"
    submission = LocalLauncher().submit(run_directory(tmp_path / "run", body))
    output = io.StringIO()
    state = follow(submission, Screen(output), raw=True, poll_seconds=0.2)
    assert state.phase == "succeeded"
    expected = [f"Job {submission.job_id} is running", "step 1", "step 2", "step 3", "no newline"]
    assert output.getvalue().splitlines() == expected


def test_a_job_that_died_before_its_log_is_still_heard(tmp_path: Path) -> None:
    submission = LocalLauncher().submit(run_directory(tmp_path / "run", "echo no such python >&2\nfinish 1"))
    output = io.StringIO()
    assert follow(submission, Screen(output), raw=True, poll_seconds=0.2).exit_code == 1
    assert output.getvalue().splitlines()[-1] == "no such python"


def test_ctrl_c_ends_the_looking_and_not_the_job(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "echo on >> $log; until [ -e go ]; do sleep 0.05; done\nfinish 0")
    launcher = LocalLauncher()
    submission = launcher.submit(run_dir)
    output = io.StringIO()
    presser = when_written(output, "on\n")
    state = follow(submission, Screen(output), raw=True, poll_seconds=60.0)
    presser.join()
    assert state.phase == "running"
    last = output.getvalue().splitlines()[-1]
    assert "continues" in last
    assert f"llmlaunch logs {run_dir}" in last
    assert launcher.states([submission])[submission.job_id].phase == "running"
    (run_dir / "go").touch()
    wait_until(lambda: launcher.states([submission])[submission.job_id].phase == "succeeded")


def test_each_reason_is_told_once_and_again_after_a_requeue(tmp_path: Path) -> None:
    submission = slurm_job(tmp_path)
    priority, cancelled = JobState("pending", "PENDING", "Priority"), JobState("cancelled", "CANCELLED")
    output = io.StringIO()
    ask = Recorded(job12=[WAITS, WAITS, priority, RUNS, WAITS, cancelled])
    assert follow(submission, Screen(output), raw=True, ask=ask, poll_seconds=0.01).phase == "cancelled"
    assert output.getvalue().splitlines() == [
        "Job 12 is waiting: Resources",
        "Job 12 is waiting: Priority",
        "Job 12 is running",
        "Job 12 is waiting: Resources",
    ]


@pytest.fixture
def runs(tmp_path: Path) -> list[Submission]:
    submissions = []
    for name, job in (("0-a", "11"), ("1-b", "12")):
        directory = tmp_path / name
        write(directory / "run.json", {"nodes": 1})
        write(directory / "attempts" / f"{job}.0" / "attempt.json", {"nodes": ["n1"]})
        append(directory / "logs" / f"{job}.0.n1.log", "step 5/40 | loss 3.1234 | 0.50 s/step | 1969 tokens/s")
        submissions.append(Submission("slurm", job, directory, 0.0))
    return submissions


def test_of_several_runs_a_line_is_written_when_a_state_changes(runs: list[Submission]) -> None:
    ask = Recorded(job11=[WAITS, RUNS, DONE], job12=[RUNS, FAILED])
    output = io.StringIO()
    states = follow_several(runs, Screen(output), ask=ask, poll_seconds=0.01)
    assert states == {"11": DONE, "12": FAILED}
    assert [line for line in output.getvalue().splitlines() if "Attempt" not in line] == [
        "0-a [11] pending: Resources",
        "1-b [12] running",
        "0-a [11] running",
        "1-b [12] failed: rank 0 exited with 7",
        "0-a [11] succeeded: 1 node",
    ]
    assert ask.questions == [["11", "12"], ["11", "12"], ["11"]]  # none about those that have ended


def test_on_a_terminal_each_of_several_runs_has_a_line_in_place(runs: list[Submission]) -> None:
    screen, ask = TerminalStream(), Recorded(job11=[RUNS, DONE], job12=[RUNS, DONE])
    follow_several(runs, Screen(screen), ask=ask, poll_seconds=0.01)
    table = "0-a [11] step 5/40 | loss 3.1234 | 0.5 s/step | 1,969 tokens/s | 18 s left\n1-b [12] step 5/40 "
    assert table in screen.getvalue()


def test_a_narrow_terminal_keeps_all_of_the_step(runs: list[Submission], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    screen = TerminalStream()
    follow(runs[0], Screen(screen), ask=Recorded(job11=[RUNS, DONE]), poll_seconds=0.01)
    shown = "step 5/40 | loss 3.1234 | 0.5 s/step |\n  1,969 tokens/s | 18 s left\n"
    drawn, _, left = screen.getvalue().rpartition("\r\x1b[1A\x1b[2K\x1b[1A\x1b[2K")
    assert drawn.endswith(f"{shown}\x1b[?25h")
    assert left == shown


def test_a_job_nobody_knows_is_given_up_and_does_not_hold_up_the_others(tmp_path: Path, runs: list[Submission]) -> None:
    output = io.StringIO()
    ask = Recorded(job11=[UNKNOWN], job12=[UNKNOWN])
    state = follow(slurm_job(tmp_path), Screen(output), raw=True, ask=ask, poll_seconds=0.01, patience_seconds=0.1)
    assert state.phase == "unknown"
    assert output.getvalue() == "Job 12 is not known: SLURM does not know job 12\n"
    ask = Recorded(job11=[UNKNOWN], job12=[RUNS, DONE])
    states = follow_several(runs, Screen(io.StringIO()), ask=ask, poll_seconds=0.01, patience_seconds=0.1)
    assert (states["11"].phase, states["12"].phase) == ("unknown", "succeeded")
