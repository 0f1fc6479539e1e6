"""`llmlaunch logs`: the node, attempt and lines that are asked for; what is not there is named with what is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llmlaunch.cli.main import main


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


class Printed:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
        self._capsys, self._monkeypatch, self._run = capsys, monkeypatch, run

    def __call__(self, *words: str, code: int = 0) -> tuple[list[str], str]:
        self._monkeypatch.setattr(sys, "argv", ["llmlaunch", "logs", str(self._run), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert ended.value.code == code, err
        return out.splitlines(), err


@pytest.fixture
def logs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path) -> Printed:
    return Printed(capsys, monkeypatch, run)


def test_the_last_attempt_of_all_nodes(logs: Printed, run: Path) -> None:
    lines, err = logs()
    assert lines == [f"{node}: 12.1 {node} line {n}" for node in ("job", "a2", "a10") for n in (1, 2, 3)]
    assert err.splitlines() == [
        "also there:",
        f"  {run}/logs/12.1.a2.monitor.log",
        f"  {run}/attempts/12.1/stacks",  # flight/ is there, too, and empty
    ]


@pytest.mark.parametrize(
    ("words", "shown"),
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
def test_what_is_asked_for(logs: Printed, words: list[str], shown: list[str]) -> None:
    assert logs(*words)[0] == shown


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--node", "a3"], "no node 'a3' left a log; there are a2, a10"),
        (["--node", "7"], "no node '7' left a log; there are a2, a10"),
        (["--attempt", "12.7"], "no attempt '12.7' left a log; there are 12.0, 12.1"),
        (["--job", "--node", "a2"], "leave out --node"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(logs: Printed, words: list[str], why: str) -> None:
    lines, err = logs(*words, code=2)
    assert lines == []
    assert why in err


def test_a_run_that_has_not_begun_has_no_logs_yet(logs: Printed, run: Path) -> None:
    for path in (run / "logs").iterdir():
        path.unlink()
    assert logs()[0] == []
    assert "there are none yet" in logs("--node", "a2", code=2)[1]
