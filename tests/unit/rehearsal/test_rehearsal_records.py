"""A rehearsed rank is kept as a measurement record of its own evidence, and stands for its own shape alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmlaunch.accuracy.scoring import score_all
from llmlaunch.accuracy.summary import families
from llmlaunch.calibration.records import problem
from llmlaunch.calibration.step_times import predicted_seconds, timed_runs
from llmlaunch.cluster.cards import machines
from llmlaunch.rehearsal.records import shape_of
from llmlaunch.rehearsal.verdict import rehearsed_ranks
from llmlaunch.timing.correction import TimeCorrection
from support.rehearsed_plans import PINS, VERSIONS, on_gpu, planned, records, traced

JOB = planned()


def shape(*words: str) -> str:
    one = planned(*words)
    return str(shape_of(one.recipe, one.plan)["shape"])


SHAPE = shape()


def test_a_trace_counts_what_is_alive_and_claims_no_more() -> None:
    (record,) = records(JOB, traced(JOB, 3))
    assert problem(record) is None
    assert record["peak_kind"] == "allocated"
    assert record["family"] == record["source"]["evidence"] == "rehearsed"
    assert record["pipeline_rank"] == 3
    assert record["backend_version"] == "0.19.2"  # what ran
    assert record["peak_bytes"] == record["predicted_bytes"] == JOB.plan.estimate.ranks[3].allocated_bytes
    assert record["observed"]["replayed_reserved_bytes"] == JOB.plan.estimate.ranks[3].reserved_bytes
    assert "reserved_peak_bytes" not in record["observed"]
    assert "unvalidated" in record["source"]["note"]
    assert record["rehearsal"]["command"] == "llmlaunch rehearse llama3-8b.yaml"


def test_a_gpu_says_all_three_peaks_and_that_nccl_is_in_none() -> None:
    found = records(JOB, on_gpu(JOB, 1))
    assert [record["peak_kind"] for record in found] == ["allocated", "reserved", "device"]
    rank = JOB.plan.estimate.ranks[1]
    predicted = [rank.allocated_bytes, rank.reserved_bytes, rank.device_bytes]
    assert [record["predicted_bytes"] for record in found] == predicted
    assert all("NCCL's memory is not in it" in record["source"]["note"] for record in found)


def test_a_rank_that_ran_out_has_no_peak_and_says_what_it_had_reached() -> None:
    (record,) = records(JOB, on_gpu(JOB, 0, ran_out=True))
    assert (record["peak_kind"], record["peak_bytes"]) == ("oom", None)
    assert record["observed"]["process_peak_bytes"] == JOB.plan.estimate.ranks[0].device_bytes


def test_ids_are_unique_and_the_same_for_the_same_rehearsal() -> None:
    ranks = [on_gpu(JOB, 0), on_gpu(JOB, 1), traced(JOB, 0), traced(JOB, 1)]
    first = [record["id"] for record in records(JOB, *ranks)]
    assert len(set(first)) == len(first) == 8
    assert first == [record["id"] for record in records(planned(), *ranks, at=2e9)]
    assert first[-1].split("/")[0::2] == ["rehearsed", "trace", "rank1"]


@pytest.mark.parametrize("kind", ["trace", "gpu"])
def test_priced_again_it_is_predicted_as_the_plan_predicted_it(kind: str) -> None:
    """A trace runs nothing compiled, and yet its record is priced as the plan is: a difference there is one that the
    comparison explains, not one that the formula for the job may be bent to."""
    for rank in range(JOB.plan.layout.pipeline):
        for record in records(JOB, traced(JOB, rank) if kind == "trace" else on_gpu(JOB, rank)):
            [again] = score_all([record], machines())
            assert again.supported, again.reason
            assert again.predicted_bytes == record["predicted_bytes"], (rank, record["peak_kind"])


def test_accuracy_shows_them_as_a_family_of_their_own() -> None:
    found = score_all(records(JOB, traced(JOB, 0, 1.1)), machines())
    assert list(families(found)) == ["rehearsed/allocated"]


def test_records_come_back_as_the_ranks_they_were() -> None:
    ranks = (on_gpu(JOB, 0, ran_out=True), traced(JOB, 1), on_gpu(JOB, 3))
    kept = json.loads(json.dumps(records(JOB, *ranks)))
    assert rehearsed_ranks(kept, SHAPE, JOB.recipe, JOB.plan) == ranks


def test_a_gpu_goes_before_a_trace_and_the_newer_before_the_older() -> None:
    other = {**VERSIONS, "torch": "2.12.1"}
    older, newer = records(JOB, traced(JOB, 0, 1.2), at=1e9), records(JOB, traced(JOB, 0, 1.3, versions=other), at=2e9)
    (found,) = rehearsed_ranks([*newer, *older], SHAPE, JOB.recipe, JOB.plan)
    assert found.versions["torch"] == "2.12.1"
    (found,) = rehearsed_ranks([*records(JOB, on_gpu(JOB, 0)), *newer], SHAPE, JOB.recipe, JOB.plan)
    assert found.on == "gpu"


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (("layout.tensor=4", *PINS[1:]), False),
        ((*PINS[:2], "layout.micro_batch_size=2", *PINS[3:]), False),
        ((*PINS, "training.sequence_length=4096"), False),
        ((*PINS, "layout.recompute=full"), False),
        ((*PINS, "nodes=8"), False),
        ((*PINS, "cluster=h200-141gb-x8"), False),
        ((*PINS, "training.gradient_dtype=bf16"), False),
        ((*PINS, 'backend.extra_args=["--my-own-flag"]'), False),
        ((*PINS, "training.global_batch_size=32"), False),
        ((*PINS, "training.steps=7", "name=another", "training.learning_rate=1.0e-5", "memory.limit=0.7"), True),
        ((*PINS, "training.global_batch_size=2048"), True),
    ],
)
def test_a_shape_is_what_memory_depends_on_and_nothing_else(words: tuple[str, ...], same: bool) -> None:
    assert (shape(*words) == SHAPE) == same


def test_another_version_of_the_framework_is_another_rehearsal() -> None:
    kept = records(JOB, traced(JOB, 0))
    old = planned(*PINS, 'backend.version="0.16"')
    assert rehearsed_ranks(kept, SHAPE, old.recipe, JOB.plan) == ()
    new = planned(*PINS, "backend.version=0.19.0")
    assert len(rehearsed_ranks(kept, SHAPE, new.recipe, JOB.plan)) == 1


def test_a_timed_rank_says_something_of_the_device_and_of_no_link() -> None:
    """Each rank is a run of its own; what it sent to nobody took no time."""
    ranks = [replace(on_gpu(JOB, number), step_seconds=10.0) for number in (0, 1)]
    stored = json.loads(json.dumps(records(JOB, *ranks)))
    [(job, runs)] = timed_runs(stored, machines())[0].items()
    assert [run.alone for run in runs] == [0, 1]
    assert not job.mixture
    for run in runs:
        plain = predicted_seconds(run)
        assert plain < JOB.plan.chosen.step_seconds
        assert predicted_seconds(run, TimeCorrection(fabric=3.0, node=3.0)) == plain
        assert predicted_seconds(run, TimeCorrection(compute=1.5)) > 1.4 * plain
    assert timed_runs(records(JOB, on_gpu(JOB, 1)), machines())[0] == {}, "nobody timed it"
