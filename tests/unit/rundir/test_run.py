"""A run directory is read back as far as it got; what is none is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.rundir.run import RunDirectoryError, read_run
from support.store_run_dirs import RunDir


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = RunDir(tmp_path / "run")
    (run.path / "run.id").unlink()
    return run.path


def test_a_fresh_directory_has_no_attempts_yet(run: Path) -> None:
    files = read_run(run)
    assert files.run["name"] == "tiny"
    assert (files.run_id, files.submission, files.status) == (None, None, None)
    assert (files.attempts, files.problems) == ((), ())


def test_attempts_come_in_the_order_they_started_with_their_ranks(run: Path) -> None:
    for attempt, started in (("9.0", 200.0), ("10.0", 100.0)):
        (run / "attempts" / attempt / "ranks").mkdir(parents=True)
        for rank in (1, 0, 10):
            record = {"v": 1, "rank": rank, "started_at": started + rank, "exit_code": 0}
            (run / "attempts" / attempt / "ranks" / f"{rank}.json").write_text(json.dumps(record))
    (run / "attempts" / "9.0" / "done").mkdir()
    (run / "attempts" / "9.0" / "done" / "node1").touch()
    (run / "run.id").write_text("tiny-1\n")
    files = read_run(run)
    assert [attempt.name for attempt in files.attempts] == ["10.0", "9.0"]
    assert [record["rank"] for record in files.attempts[1].ranks] == [0, 1, 10]
    assert files.attempts[1].done == ["node1"]
    assert files.run_id == "tiny-1"


def test_torn_files_are_named_and_the_rest_counts(run: Path) -> None:
    (run / "attempts" / "1.0" / "ranks").mkdir(parents=True)
    (run / "attempts" / "1.0" / "ranks" / "0.json").write_text('{"v": 1, "ra')
    (run / "status.json").write_text('{"state"')
    files = read_run(run)
    assert files.status is None
    assert files.attempts[0].ranks == []
    assert len(files.problems) == 2


def test_what_is_no_run_directory_is_refused(run: Path, tmp_path: Path) -> None:
    for folder, content, message in (
        (tmp_path / "nowhere", "", "is no folder"),
        (tmp_path, "", "no run directory"),
        (run, "{", "cannot be read"),
        (run, '{"schema": 2}', "schema 2"),
    ):
        (run / "run.json").write_text(content)
        with pytest.raises(RunDirectoryError, match=message):
            read_run(folder)
