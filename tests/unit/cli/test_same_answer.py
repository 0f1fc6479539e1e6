"""Every screen says the same of how a run ended and what to do, also of runs that llmlaunch did not submit, and without
SLURM where the files say it."""

from __future__ import annotations

import json
import platform
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.command_line import CommandLine
from support.store_run_dirs import STARTED, RunDir, finished_cpu_run

CRASH = {
    "kind": "host_oom", "node": "n0", "rank": 0, "line": "Killed", "source": "log", "consequence": False, "sick": False,
    "numbers": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a test types as it was told write here."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def slurm_asked(tmp_path: Path, put_commands: Callable[..., Path]) -> Callable[[], list[str]]:
    """Each question to SLURM; nobody answers."""
    note = tmp_path / "asked"
    put_commands(**dict.fromkeys(("squeue", "sacct", "scontrol"), f'echo "$0 $@" >> {note}; exec sleep 600'))
    return lambda: note.read_text().splitlines() if note.exists() else []


def failed_run(path: Path, cause: dict[str, Any] | None = None, **run: Any) -> RunDir:
    """A run whose job 77 failed; without submission.json, as `sbatch job.sbatch` leaves it."""
    directory = RunDir(path)
    directory.ranks(exit_code=1)
    directory.write("run.json", {**directory.run, "progress": {"steps": 30}, **run})
    directory.write("attempts/77.0/attempt.json", {"schema": 1, "attempt": "77.0", "nodes": ["n0"], "layout": ""})
    (path / "logs" / "77.0.n0.log").write_text("the trainer began\nKilled\n")
    end = {"state": "failed", "exit_code": 1, "why": "rank 0 exited with 1", "next": {"action": "end"}}
    directory.status(**end, cause=cause or CRASH)
    (path / "job.sbatch").write_text("#!/bin/bash\n")
    return directory


def submitted(run: RunDir, launcher: str = "slurm", job: str = "77") -> RunDir:
    cluster = platform.node() if launcher == "local" else None
    submission = {"schema": 1, "launcher": launcher, "job_id": job, "submitted_at": STARTED, "cluster": cluster}
    run.write("submission.json", submission)
    return run


def next_commands(screen: str) -> list[list[str]]:
    """The words of each command that the last lines of a screen propose, without `llmlaunch`."""
    proposed = [line[6:] for line in screen.splitlines() if line.startswith(("Next: llmlaunch", "      llmlaunch"))]
    return [shlex.split(command, comments=True)[1:] for command in proposed]


def test_every_screen_has_the_same_advice(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = submitted(failed_run(tmp_path / "run"))
    advice = llmlaunch.json("status", run.path)["advice"]
    assert advice.startswith("Main memory was full")
    assert llmlaunch.json("report", run.path)["state"]["advice"] == advice
    for command in ("status", "report"):
        assert advice in " ".join(llmlaunch(command, run.path).stdout.split())
    assert advice in " ".join(llmlaunch("logs", run.path).stderr.split())
    llmlaunch("report", run.path, "--html", tmp_path / "page.html")
    assert "Main memory was full" in (tmp_path / "page.html").read_text()


def test_a_finished_run_is_shown_without_slurm(
    llmlaunch: CommandLine, tmp_path: Path, slurm_asked: Callable[[], list[str]]
) -> None:
    run = submitted(finished_cpu_run(tmp_path / "run"))
    run.write("attempts/77.0/attempt.json", {"schema": 1, "attempt": "77.0", "nodes": ["n0"], "layout": ""})
    assert llmlaunch.json("status", run.path)["phase"] == "succeeded"
    assert llmlaunch.json("report", run.path)["state"]["phase"] == "succeeded"
    llmlaunch("status", run.path)
    llmlaunch("status", run.path, "--watch")
    llmlaunch("logs", run.path)
    llmlaunch("logs", run.path, "--follow")
    assert llmlaunch.json("runs")["runs"][0]["phase"] == "succeeded"
    llmlaunch("status", run.path, run.path)
    assert slurm_asked() == []


def test_a_cancelled_run_is_shown_as_cancelled_without_slurm(
    llmlaunch: CommandLine, tmp_path: Path, slurm_asked: Callable[[], list[str]]
) -> None:
    run = submitted(failed_run(tmp_path / "run"))
    (run.path / "logs" / "77.cancelled").touch()
    assert llmlaunch.json("status", run.path)["phase"] == "cancelled"
    assert slurm_asked() == []


def test_a_run_that_may_go_on_is_asked_for(
    llmlaunch: CommandLine, tmp_path: Path, put_commands: Callable[..., Path]
) -> None:
    put_commands(squeue="echo '77|PENDING|1|N/A|BeginTime|'", sacct="true")
    run = submitted(failed_run(tmp_path / "run"))
    run.status(state="failed", exit_code=1, cause=CRASH, next={"action": "requeue", "seconds": 60})
    assert llmlaunch.json("status", run.path)["phase"] == "pending"


def test_a_silent_controller_costs_one_short_wait_and_a_message(
    llmlaunch: CommandLine, tmp_path: Path, slurm_asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMLAUNCH_ANSWER_SECONDS", "0.3")
    monkeypatch.setattr("llmlaunch.launchers.slurm.launcher._SILENT_SECONDS", 0.1)
    run = submitted(RunDir(tmp_path / "run"))
    run.write("attempts/77.0/attempt.json", {"schema": 1, "attempt": "77.0", "nodes": ["n0"], "layout": ""})
    run.write("attempts/77.0/progress.json", {"step": 11, "steps": 30})
    shown = llmlaunch("status", run.path)
    assert "squeue did not answer in time; step 11 of 30" in shown.stdout
    assert shown.stderr == ""
    assert sorted(line.split()[0].rpartition("/")[2] for line in slurm_asked()) == ["sacct", "squeue"]


def test_a_run_started_by_hand_has_a_status_logs_and_a_report(
    llmlaunch: CommandLine, tmp_path: Path, slurm_asked: Callable[[], list[str]]
) -> None:
    run = failed_run(tmp_path / "run")
    status = llmlaunch.json("status", run.path)
    assert (status["phase"], status["job_id"], status["launcher"]) == ("failed", "77", "slurm")
    assert llmlaunch("logs", run.path).stdout == "the trainer began\nKilled\n"
    report = llmlaunch.json("report", run.path)
    assert report["state"]["phase"] == "failed"
    assert (report["run"]["job_id"], report["run"]["launcher"]) == ("77", "slurm")
    assert slurm_asked() == []
    assert ["resume", str(run.path)] in next_commands(llmlaunch("status", run.path).stdout)


def test_a_run_started_by_hand_that_goes_on_is_asked_for(
    llmlaunch: CommandLine, tmp_path: Path, put_commands: Callable[..., Path]
) -> None:
    put_commands(squeue="echo '77|RUNNING|0|N/A|None|'", sacct="true")
    run = failed_run(tmp_path / "run")
    (run.path / "status.json").unlink()
    assert llmlaunch.json("status", run.path)["phase"] == "running"
    steps = next_commands(llmlaunch("status", run.path).stdout)
    assert [step[0] for step in steps] == ["status", "logs"]  # its job was not submitted by llmlaunch
    assert llmlaunch.json("report", run.path)["state"]["phase"] == "running"


@pytest.mark.parametrize("typed", ["job.sbatch", "/RUN/job.sbatch"])
def test_a_run_started_by_hand_that_waits_is_pending_and_not_submitted_twice(
    llmlaunch: CommandLine, tmp_path: Path, put_commands: Callable[..., Path], typed: str
) -> None:
    run = RunDir(tmp_path / "run")
    (run.path / "job.sbatch").write_text("#!/bin/bash\n")
    work = run.path if typed == "job.sbatch" else tmp_path
    script = typed.replace("/RUN", str(run.path))
    queued = f"76|2026-11-21T13:41:58|/elsewhere|job.sbatch\\n77|2026-11-21T13:41:58|{work}|{script}\\n"
    by_id = "77|PENDING|0|N/A|Resources|\\n"
    put_commands(
        squeue=f"case \"$*\" in *--me*) printf '{queued}';; *) printf '{by_id}';; esac", sacct="true", sbatch="exit 1"
    )
    status = llmlaunch.json("status", run.path)
    assert (status["phase"], status["job_id"], status["reason"]) == ("pending", "77", "Resources")
    assert llmlaunch.json("report", run.path)["state"]["phase"] == "pending"
    assert [words[0] for words in next_commands(llmlaunch("status", run.path).stdout)] == ["status", "logs"]
    assert "its job 77 is pending" in llmlaunch("resume", run.path, code=2).stderr


def test_a_run_started_with_bash_is_a_local_run(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.ranks(attempt="local-5-6.0")
    run.write("attempts/local-5-6.0/attempt.json", {"schema": 1, "attempt": "local-5-6.0", "nodes": ["n0"]})
    run.status(attempt="local-5-6.0")
    (run.path / "job.sbatch").write_text("#!/bin/bash\n")
    status = llmlaunch.json("status", run.path)
    assert (status["phase"], status["launcher"]) == ("succeeded", "local")


def test_a_refused_run_that_was_started_by_hand_is_no_longer_refused(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = failed_run(tmp_path / "run")
    run.write("ended.json", {"schema": 1, "phase": "refused", "at": time.time() - 60, "reason": "no such partition"})
    assert llmlaunch.json("status", run.path)["phase"] == "failed"
    assert llmlaunch.json("report", run.path)["state"]["phase"] == "failed"


def test_a_directory_that_nobody_started_says_how(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (run.path / "job.sbatch").write_text("#!/bin/bash\n")
    message = llmlaunch("status", run.path, code=2).stderr
    assert "No job of it is in the queue, or has begun" in message
    assert llmlaunch.json("report", run.path)["state"]["phase"] == "not submitted"


@pytest.mark.parametrize("kind", ["host_oom", "preempted"])
def test_what_llmlaunch_did_not_submit_is_left_to_its_owner(llmlaunch: CommandLine, tmp_path: Path, kind: str) -> None:
    run = submitted(failed_run(tmp_path / "run", {**CRASH, "kind": kind}, observed=True), "local", "local-5-77")
    (run.path / "attempts" / "77.0").rename(run.path / "attempts" / "local-5-77.0")
    (run.path / "logs" / "77.0.n0.log").rename(run.path / "logs" / "local-5-77.0.n0.log")
    (run.path / "job.sbatch").unlink()
    status = json.loads((run.path / "status.json").read_text())
    run.write("status.json", {**status, "attempt": "local-5-77.0"})
    for command in ("status", "report", "logs", "cancel"):
        shown = "".join(llmlaunch(command, run.path))
        assert "resume" not in shown, command
        if command != "logs":
            for words in next_commands(shown):
                llmlaunch(*words)
    assert "resume" not in (llmlaunch.json("status", run.path)["advice"] or "")
    assert "resume" not in json.dumps(llmlaunch.json("report", run.path))


STEP_LINES = {"steps": 30, "step_patterns": [r"step (?P<step>\d+)/(?P<steps>\d+)"]}


def test_every_screen_counts_the_same_steps(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = submitted(failed_run(tmp_path / "run", progress=STEP_LINES))
    run.write("attempts/77.0/progress.json", {"step": 11, "steps": 30})
    (run.path / "logs" / "77.0.n0.log").write_text("step 11/30\n" + "step 12/30\nKilled\n")
    llmlaunch("collect", run.path)
    assert llmlaunch.json("status", run.path)["progress"]["step"] == 12
    assert "step 12 of 30" in llmlaunch("status", run.path).stdout
    assert llmlaunch.json("report", run.path)["state"]["step"] == 12
    assert "step 12 of 30" in llmlaunch("report", run.path).stdout
    assert llmlaunch.json("report", run.path)["attempts"][-1]["to_step"] == 12
    assert llmlaunch.json("runs")["runs"][0]["step"] == 12


def test_a_run_that_went_back_is_at_the_step_of_its_newest_attempt(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = submitted(failed_run(tmp_path / "run", progress=STEP_LINES))
    run.write("attempts/77.0/progress.json", {"step": 20, "steps": 30})
    run.rank(0, "77.1", started_at=STARTED + 500)
    run.write("attempts/77.1/attempt.json", {"schema": 1, "attempt": "77.1", "started_at": STARTED + 500})
    run.write("attempts/77.1/progress.json", {"step": 15, "steps": 30})
    run.status("77.1", "failed", 1, cause=CRASH)
    llmlaunch("collect", run.path)
    steps = (
        llmlaunch.json("status", run.path)["progress"]["step"],
        llmlaunch.json("report", run.path)["state"]["step"],
        llmlaunch.json("runs")["runs"][0]["step"],
    )
    assert steps == (15, 15, 15)


def test_a_run_without_steps_is_not_compared(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = submitted(failed_run(tmp_path / "run"))
    report = llmlaunch.json("report", run.path)
    assert all(row["error"] is None and row["measured"] is None for row in report["compared"])
    assert report["memory"]["stages"][0]["peak_bytes"] > 0
    shown = llmlaunch("report", run.path).stdout
    assert "%" not in shown
    assert " ".join(shown.split()).count("ended before its first step") == 1
    run.write("attempts/77.0/progress.json", {"step": 2, "steps": 30})
    assert llmlaunch.json("report", run.path)["compared"][0]["error"] is not None


def test_report_says_what_collect_measured(llmlaunch: CommandLine, tmp_path: Path) -> None:
    """The main memory of a node alone, as of a command that starts no ranks."""
    run = submitted(RunDir(tmp_path / "run"))
    run.write("attempts/77.0/attempt.json", {"schema": 1, "attempt": "77.0", "nodes": ["n0"]})
    run.line("n0", host={"used_bytes": 5 << 30, "used_peak_bytes": 6 << 30, "total_bytes": 64 << 30})
    run.status(state="failed", exit_code=1)
    collected = llmlaunch("collect", run.path)
    measured = llmlaunch.json("measurements", "list")["measurements"]
    report = llmlaunch.json("report", run.path)
    assert [record["peak_kind"] for record in measured] == ["host"], collected
    assert report["memory"]["kinds"] == {"host": measured[0]["peak_bytes"]}
    assert not any("No peak of memory" in what for what in report["missing"])
