"""A run directory that the version before left, with a file for each rank and each process (tests/data/runs)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmlaunch.rundir.attempt import Attempt, rank_records
from llmlaunch.rundir.memory_files import MemoryWatch, summarize
from llmlaunch.rundir.run import read_run
from llmlaunch.rundir.submission_files import read_job_end
from support.store_run_dirs import ATTEMPT

EARLIER = Path(__file__).resolve().parents[2] / "data" / "runs" / "a_file_for_each_rank"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EARLIER, tmp_path / "run"))


def test_its_ranks_are_read(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    assert rank_records(run / "attempts" / ATTEMPT) == status["ranks"]
    (attempt,) = read_run(run).attempts
    assert [(record["rank"], record["exit_code"]) for record in attempt.ranks] == [(0, 0), (1, 0), (2, 0), (3, 7)]


def test_its_account_is_the_one_that_it_wrote(run: Path) -> None:
    written = json.loads((run / "attempts" / ATTEMPT / "summary.json").read_text())
    assert Attempt(run, ATTEMPT).summary is not None  # whole by the files of then
    assert summarize(run, ATTEMPT).as_json() == json.loads(json.dumps(written))
    watched = {rank.rank: rank.reserved_peak_bytes for rank in MemoryWatch(run, ATTEMPT).refresh()}
    assert watched == {rank["rank"]: rank["reserved_peak_bytes"] for rank in written["ranks"]}


def test_its_refusal_and_stop_signal_are_read_from_files_of_their_own(run: Path) -> None:
    (run / "refused.json").write_text(json.dumps({"schema": 1, "at": 5.0, "words": "no such partition"}))
    folder = run / "attempts" / "7.0" / "told"
    folder.mkdir(parents=True)
    (folder / "job").write_text("USR1\n")
    assert read_job_end(run) == {"phase": "refused", "at": 5.0, "reason": "no such partition"}
    assert Attempt(run, "7.0").stop_signal == "USR1"
