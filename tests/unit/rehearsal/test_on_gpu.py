"""Ranks rehearsed on a GPU: what a job that ended well, out of memory or otherwise is taken for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.choose import LauncherChoice
from llmlaunch.rehearsal.on_gpu import STEPS, run_alone
from llmlaunch.rehearsal.ranks import RankChoice, RehearsedRank, job_alone
from llmlaunch.units import GIB

ROOT = Path(__file__).parents[3]
LAYOUT = "layout={tensor: 8, pipeline: 4, virtual_pipeline: 1, context: 1, micro_batch_size: 1, recompute: none}"
USED = {"allocated_peak_bytes": 50 * GIB, "reserved_peak_bytes": 52 * GIB, "peak_bytes": 53 * GIB}
OUT_OF_MEMORY = {"kind": "oom", "rank": 384, "node": "node1", "line": "CUDA out of memory. Tried to allocate 20.00 GiB"}


@dataclass
class Jobs:
    """A launcher whose jobs have ended before anybody asks, in the order of `ends`."""

    name: str = "slurm"
    phase: Any = "succeeded"
    cause: Mapping[str, Any] | None = None
    used: Mapping[str, int] = field(default_factory=lambda: USED)
    step: int = STEPS
    submitted: list[Path] = field(default_factory=list)

    def submit(self, run_dir: Path, extra: Sequence[str] = (), again: bool = False) -> Submission:
        self.submitted.append(run_dir)
        number = len(self.submitted) if self.name == "slurm" else f"local-1-{len(self.submitted)}"
        described = json.loads((run_dir / "run.json").read_text())["rehearsal"]
        rank = {"rank": described["pipeline_rank"] * 128, "started_at": 100.0, **self.used}
        attempt = run_dir / "attempts" / f"{number}.0"
        attempt.mkdir()
        account = {"schema": 1, "attempt": attempt.name, "ranks": [rank], "step": self.step, "files": {}}
        (attempt / "summary.json").write_text(json.dumps(account))
        (attempt / "versions.json").write_text('{"torch": "2.9.0"}')
        (run_dir / "status.json").write_text(json.dumps({"cause": self.cause, "ended_at": 160.0}))
        return Submission(self.name, str(number), run_dir, 1.0)

    def states(self, submissions: Iterable[Submission]) -> Mapping[str, JobState]:
        return {one.job_id: JobState(self.phase, reason="rank 384 exited with 1") for one in submissions}

    def cancel(self, submission: Submission) -> None:
        raise AssertionError("nobody asked")


@pytest.fixture(scope="module")
def job() -> PlannedRun:
    recipe = str(ROOT / "recipes" / "llama3-70b.yaml")
    return plan(recipe, (LAYOUT, "nodes=64", "training.global_batch_size=1024"))


def rehearse(job: PlannedRun, jobs: Jobs, folder: Path, *ranks: int) -> Iterator[RehearsedRank]:
    asked = [RankChoice(job.plan.estimate.ranks[rank], (rank,)) for rank in ranks or (3,)]
    choice = LauncherChoice(jobs, "SLURM is here.")
    alone = job_alone(job.setting, job.recipe, job.plan, job.rendered, traced=False)
    return run_alone(job.recipe, job.plan, job.json, job.rendered, alone, asked, choice, folder, lambda line: None)


def test_its_own_account_says_what_a_rank_took(job: PlannedRun, tmp_path: Path) -> None:
    (one,) = rehearse(job, Jobs(), tmp_path)
    assert (one.allocated_bytes, one.reserved_bytes, one.process_bytes) == (50 * GIB, 52 * GIB, 53 * GIB)
    assert (one.pipeline_rank, one.on, one.ran_out, one.seconds) == (3, "gpu", False, 60.0)
    assert one.versions == {"torch": "2.9.0"}
    assert one.predicted == job.plan.estimate.ranks[3]


def test_every_rank_has_a_run_directory_that_says_which_it_is(job: PlannedRun, tmp_path: Path) -> None:
    list(rehearse(job, Jobs(), tmp_path, 0, 3))
    found = {path.name: json.loads((path / "run.json").read_text())["rehearsal"] for path in tmp_path.iterdir()}
    assert {name: about["pipeline_rank"] for name, about in found.items()} == {"rank0": 0, "rank3": 3}
    assert found["rank3"]["stands_for"] == [3]
    assert found["rank3"]["shape"]


def test_under_slurm_all_wait_together_and_on_one_machine_one_after_the_other(job: PlannedRun, tmp_path: Path) -> None:
    for name, waiting in (("slurm", 2), ("local", 1)):
        jobs = Jobs(name)
        next(rehearse(job, jobs, tmp_path / name, 0, 3))
        assert len(jobs.submitted) == waiting


def test_out_of_device_memory_is_a_result(job: PlannedRun, tmp_path: Path) -> None:
    (one,) = rehearse(job, Jobs(phase="failed", cause=OUT_OF_MEMORY, step=0), tmp_path)
    assert one.ran_out
    assert one.allocated_bytes == 50 * GIB
    assert any("Tried to allocate" in remark for remark in one.remarks)


NOT_TO_ITS_END = r"did not run to its end: rank 384 exited with 1; its log is in .*rank3/logs"
TOO_SMALL = {"cause": OUT_OF_MEMORY, "used": {**USED, "device_total_bytes": 40 * GIB}}


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        ({"phase": "failed"}, NOT_TO_ITS_END),
        ({"phase": "cancelled"}, NOT_TO_ITS_END),
        ({"phase": "stopped"}, NOT_TO_ITS_END),
        ({"step": 1}, "after 1 of 3 steps"),
        ({"used": {}}, "nobody saw what it took"),
        ({**TOO_SMALL, "phase": "succeeded"}, "was given a device of 40.0 GiB, and the job is planned for 79"),
        ({**TOO_SMALL, "phase": "failed"}, "was given a device of 40.0 GiB, and the job is planned for 79"),
    ],
)
def test_any_other_end_shows_no_peak(job: PlannedRun, tmp_path: Path, ended: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(rehearse(job, Jobs(**ended), tmp_path))


def test_what_cannot_run_alone_is_said_before_anything_is_written(job: PlannedRun, tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes" / "llama3-70b.yaml")
    own = "backend.extra_args=[--use-torch-fsdp2]"
    with pytest.raises(UserError, match="--use-torch-fsdp2"):
        next(rehearse(plan(recipe, (LAYOUT, "nodes=64", own)), Jobs(), tmp_path))
    assert list(tmp_path.iterdir()) == []
