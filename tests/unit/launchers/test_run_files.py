"""The small files of a run directory: written once, whole, and read back as they were."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.run_files import End, name_run, prepare, read_end, read_submission, write_submission
from support.local_jobs import run_directory


def submission_of(run_dir: Path, job_id: str = "12", launcher: str = "slurm") -> Submission:
    return Submission(launcher, job_id, run_dir, 1700000000.25, "alps")


def test_a_submission_is_read_back_as_written(tmp_path: Path) -> None:
    assert read_submission(tmp_path) is None
    submission = submission_of(tmp_path)
    write_submission(submission)
    assert read_submission(tmp_path) == submission


def test_of_many_writers_one_wins_and_the_others_hear_of_it(tmp_path: Path) -> None:
    def write(number: int) -> bool:
        try:
            write_submission(submission_of(tmp_path, str(number + 1)))
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(write, range(40)))
    assert written.count(True) == 1
    winner = read_submission(tmp_path)
    assert winner is not None
    assert winner.job_id == str(written.index(True) + 1)
    assert [path.name for path in tmp_path.iterdir()] == ["submission.json"]


def test_a_run_keeps_the_name_it_has(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", "finish 0")
    name = name_run(run_dir)
    assert re.fullmatch(r"sample-\d{8}T\d{6}Z-[0-9a-f]{4}", name)
    assert name_run(run_dir) == name
    assert (run_dir / "run.id").read_text() == f"{name}\n"


def test_a_directory_with_a_job_is_submitted_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no job\.sbatch"):
        prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []
    run_dir = run_directory(tmp_path / "run", "finish 0")
    write_submission(submission_of(run_dir))
    with pytest.raises(UserError, match="already submitted as slurm job 12"):
        prepare(run_dir)


def end(run_dir: Path, attempt: str, state: str = "succeeded", code: int = 0) -> None:
    record = {"schema": 1, "attempt": attempt, "state": state, "exit_code": code, "why": "all done"}
    (run_dir / "status.json").write_text(json.dumps(record))


def test_the_end_is_the_job_s_own(tmp_path: Path) -> None:
    end(tmp_path, "12.0", "failed", 3)
    assert read_end(submission_of(tmp_path, "12")) == End("failed", 3, "all done")
    for other in ("1", "120"):
        assert read_end(submission_of(tmp_path, other)) is None


def test_the_end_of_an_attempt_before_a_requeue_does_not_count_nor_does_a_torn_one(tmp_path: Path) -> None:
    end(tmp_path, "12.9", "failed", 143)
    (tmp_path / "attempts" / "12.10").mkdir(parents=True)
    assert read_end(submission_of(tmp_path)) is None
    end(tmp_path, "12.10")
    assert read_end(submission_of(tmp_path)) is not None
    (tmp_path / "status.json").write_text('{"schema": 1, "attempt": "12.10", "sta')
    assert read_end(submission_of(tmp_path)) is None
