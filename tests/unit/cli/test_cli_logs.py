"""`llmlaunch logs`: the node, attempt and lines that are asked for; what is not there is named with what is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_line import CommandLine


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts on two nodes; the second hung."""
    directory = tmp_path / "run"
    (directory / "logs").mkdir(parents=True)
    (directory / "job.sbatch").write_text("#!/bin/bash\n")
    (directory / "run.json").write_text(json.dumps({"schema": 1, "name": "sample", "nodes": 2}))
    submission = {"schema": 1, "launcher": "slurm", "job_id": "12", "submitted_at": 1.0, "cluster": None}
    (directory / "submission.json").write_text(json.dumps(submission))
    for attempt in ("12.0", "12.1"):
        for node in ("job", "a2", "a10"):
            lines = [f"{attempt} {node} line {n}" for n in range(1, 4)]
            (directory / "logs" / f"{attempt}.{node}.log").write_text("\n".join(lines) + "\n")
    folder = directory / "attempts" / "12.1"
    (folder / "stacks").mkdir(parents=True)
    (folder / "flight").mkdir()
    (folder / "stacks" / "0.txt").write_text("in forward\n")
    (folder / "attempt.json").write_text(json.dumps({"nodes": ["a10", "a2"]}))
    (directory / "logs" / "12.1.a2.monitor.log").write_text("no driver\n")
    return directory


def test_the_last_attempt_of_all_nodes(llmlaunch: CommandLine, run: Path) -> None:
    out, err = llmlaunch("logs", run)
    assert out.splitlines() == [f"{node}: 12.1 {node} line {n}" for node in ("job", "a2", "a10") for n in (1, 2, 3)]
    assert err.splitlines() == [
        "also there:",
        f"  {run}/logs/12.1.a2.monitor.log",
        f"  {run}/attempts/12.1/stacks",  # flight/ is there, too, and empty
    ]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--node", "a2", "--tail", "1"], ["a2: 12.1 a2 line 3"]),
        (["--node", "0", "--tail", "1"], ["a10: 12.1 a10 line 3"]),  # its node rank in that attempt
        (["--job", "--tail", "1"], ["job: 12.1 job line 3"]),
        (["--job", "--attempt", "12.0", "--tail", "1"], ["job: 12.0 job line 3"]),
        (["--node", "a2", "--attempt", "0", "--tail", "1"], ["a2: 12.0 a2 line 3"]),  # its restart count
        (["--node", "a2", "--attempt", "all", "--tail", "1"], ["a2: 12.0 a2 line 3", "a2: 12.1 a2 line 3"]),
        (["--tail", "0"], []),
    ],
)
def test_what_is_asked_for(llmlaunch: CommandLine, run: Path, options: list[str], shown: list[str]) -> None:
    assert llmlaunch("logs", run, *options).stdout.splitlines() == shown


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--node", "a3"], "no node 'a3' left a log; there are a2, a10"),
        (["--node", "7"], "no node '7' left a log; there are a2, a10"),
        (["--attempt", "12.7"], "no attempt '12.7' left a log; there are 12.0, 12.1"),
        (["--job", "--node", "a2"], "leave out --node"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    llmlaunch: CommandLine, run: Path, options: list[str], why: str
) -> None:
    out, err = llmlaunch("logs", run, *options, code=2)
    assert out == ""
    assert why in err


def test_a_run_that_has_not_begun_has_no_logs_yet(llmlaunch: CommandLine, run: Path) -> None:
    for path in (run / "logs").iterdir():
        path.unlink()
    assert llmlaunch("logs", run).stdout == ""
    assert "there are none yet" in llmlaunch("logs", run, "--node", "a2", code=2).stderr
