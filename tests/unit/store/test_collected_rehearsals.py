"""The directory of a rank that ran alone on a GPU is collected as a rehearsal, and never as a run of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.frameworks.framework import framework_of
from llmlaunch.rehearsal.on_gpu import lone_rank
from llmlaunch.rehearsal.ranks import ON_GPU
from llmlaunch.rehearsal.records import records_of, shape_with_job
from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store
from llmlaunch.store.history import last_true_peaks
from llmlaunch.store.measurements import contents, put_rehearsed, rehearsed_of
from llmlaunch.store.runs import list_runs
from support.rehearsed_plans import Planned, planned
from support.rehearsed_plans import alone as what_runs
from support.store_run_dirs import ATTEMPT, GIB, STARTED, RunDir, gpu

RANK = 2
STEPS = 3
VERSIONS = {"megatron-core": "0.19.2", "torch": "2.13.0"}


def alone(path: Path, job: Planned, **about: Any) -> RunDir:
    """Pipeline rank 2 of the job, on one device; its global rank is 16 there."""
    run = RunDir(path, kind="gpu", devices=1)
    description = {"pipeline_rank": RANK, "stands_for": [1, RANK], "on": "gpu", "notes": ["said so"]}
    description |= shape_with_job(job.recipe, job.plan, what_runs(job, ON_GPU))
    lone_job = what_runs(job, ON_GPU)
    description["left_out"] = [omission.as_json() for omission in lone_job.omissions[RANK]]
    word = framework_of(lone_job.recipe).rank_alone(lone_job.recipe, job.plan.layout, lone_job.rendered, RANK, STEPS)
    described = dict(lone_rank(lone_job, word, description, STEPS).described)
    run.run = {**described, "rehearsal": {**description, **about}}
    run.write("run.json", run.run)
    run.write(f"attempts/{ATTEMPT}/progress.json", {"schema": 1, "step": STEPS, "steps": STEPS})
    run.write(f"attempts/{ATTEMPT}/versions.json", VERSIONS)
    return run


def ended(run: RunDir, state: str = "succeeded", **status: Any) -> None:
    run.rank(16, exit_code=int(state != "succeeded"), local_rank=0, node="n0")
    run.line("n0", gpus=[gpu(0, peak_gib=30, process_peak_bytes={"1016": 29 * GIB})])
    run.status(state=state, exit_code=int(state != "succeeded"), **status)


def test_it_is_the_rehearsal_of_its_pipeline_rank(store: Store, tmp_path: Path) -> None:
    job = planned()
    run = alone(tmp_path / "run", job)
    ended(run)
    (outcome,) = collect(store, [run.path])
    assert (outcome.did, outcome.measurements, outcome.reason) == ("collected", 1, None)
    (record,) = map(json.loads, contents(store))
    assert record["source"]["evidence"] == record["family"] == "rehearsed"
    assert (record["peak_kind"], record["pipeline_rank"], record["peak_bytes"]) == ("device", RANK, 29 * GIB)
    (omission,) = what_runs(job, ON_GPU).omissions[RANK]
    assert record["predicted_bytes"] == job.plan.estimate.ranks[RANK].device_bytes - omission.device_bytes
    assert (record["backend_version"], record["world_size"]) == ("0.19.2", 32)
    assert "NCCL's memory is not in it" in record["source"]["note"]
    assert record["rehearsal"]["left_out"] == [omission.as_json()]
    assert record["rehearsal"]["as_run"]["shape"] != record["rehearsal"]["shape"]
    assert (record["node"], record["started_at"]) == ("n0", STARTED + 16)
    (rank,) = rehearsed_of(store, job.recipe, job.plan)
    assert (rank.pipeline_rank, rank.stands_for, rank.process_bytes) == (RANK, (1, RANK), 29 * GIB)
    assert rank.remarks == ("said so",)
    assert rank.omissions == (omission,)


def test_one_that_ended_without_its_steps_shows_nothing(store: Store, tmp_path: Path) -> None:
    run = alone(tmp_path / "run", planned())
    run.write(f"attempts/{ATTEMPT}/progress.json", {"schema": 1, "step": 1, "steps": STEPS})
    ended(run)
    (outcome,) = collect(store, [run.path])
    assert outcome.measurements == 0
    assert "after 1 of 3 steps" in str(outcome.reason)


def test_no_run_is_made_of_it_and_collecting_twice_changes_nothing(store: Store, tmp_path: Path) -> None:
    job = planned()
    run = alone(tmp_path / "run", job)
    ended(run)
    collect(store, [run.path])
    before = contents(store)
    assert [outcome.did for outcome in collect(store, [run.path])] == ["collected"]
    assert contents(store) == before
    assert list_runs(store) == []
    assert last_true_peaks(store, job.recipe.digest, job.recipe.name) is None
    assert last_true_peaks(store, job.recipe.digest, "llama3-8b-rank2") is None


def test_what_rehearse_recorded_itself_is_the_same_rehearsal(store: Store, tmp_path: Path) -> None:
    job = planned()
    run = alone(tmp_path / "run", job)
    ended(run)
    collect(store, [run.path])
    ranks = rehearsed_of(store, job.recipe, job.plan)
    put_rehearsed(
        store,
        records_of(
            job.recipe,
            job.plan,
            what_runs(job, ON_GPU),
            ranks,
            2e9,
            "llmlaunch rehearse",
        ),
    )
    assert len(contents(store)) == 1


def test_one_that_ran_out_of_memory_is_kept_as_that(store: Store, tmp_path: Path) -> None:
    job = planned()
    run = alone(tmp_path / "run", job)
    cause = {"kind": "oom", "node": "n0", "rank": 16, "line": "torch.OutOfMemoryError: CUDA out of memory."}
    run.write(f"attempts/{ATTEMPT}/causes/n0.json", {"schema": 1, "node": "n0", "causes": [cause], **cause})
    ended(run, "failed", cause=cause)
    collect(store, [run.path])
    (record,) = map(json.loads, contents(store))
    assert (record["peak_kind"], record["peak_bytes"], record["pipeline_rank"]) == ("oom", None, RANK)
    assert rehearsed_of(store, job.recipe, job.plan)[0].ran_out


def test_one_that_failed_otherwise_shows_nothing(store: Store, tmp_path: Path) -> None:
    job = planned()
    run = alone(tmp_path / "run", job)
    ended(run, "failed")
    (outcome,) = collect(store, [run.path])
    assert contents(store) == []
    assert "ended as failed, which shows no peak" in str(outcome.reason)


@pytest.mark.parametrize("about", [{"stands_for": None}, {"pipeline_rank": 9}])
def test_one_that_cannot_be_told_says_so(store: Store, tmp_path: Path, about: dict[str, Any]) -> None:
    run = alone(tmp_path / "run", planned(), **about)
    ended(run)
    (outcome,) = collect(store, [run.path])
    assert contents(store) == []
    assert "rehearse again" in str(outcome.reason)
