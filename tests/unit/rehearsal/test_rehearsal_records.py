"""A rehearsed rank is kept as a measurement record of its own evidence, and stands for its own shape alone."""

from __future__ import annotations

import json

import pytest

from llmlaunch.accuracy.scoring import score
from llmlaunch.accuracy.summary import families
from llmlaunch.calibration.records import clusters_by_gpu, problem
from llmlaunch.rehearsal.earlier import rehearsed_ranks
from llmlaunch.rehearsal.records import shape_of
from support.rehearsed_plans import PINS, VERSIONS, on_gpu, planned, records, traced


def shape(*words: str) -> str:
    one = planned(*words)
    return str(shape_of(one.recipe, one.plan, one.rendered)["shape"])


def test_a_trace_counts_what_is_alive_and_claims_no_more() -> None:
    one = planned()
    (record,) = records(one, traced(one, 3))
    assert problem(record) is None
    assert record["peak_kind"] == "allocated"
    assert record["family"] == record["source"]["evidence"] == "rehearsed"
    assert record["pipeline_rank"] == 3
    assert record["backend_version"] == "0.19.2"  # what ran
    assert record["peak_bytes"] == record["predicted_bytes"] == one.plan.estimate.ranks[3].allocated_bytes
    assert record["observed"]["replayed_reserved_bytes"] == one.plan.estimate.ranks[3].reserved_bytes
    assert "reserved_peak_bytes" not in record["observed"]
    assert "unvalidated" in record["source"]["note"]
    assert record["rehearsal"]["command"] == "llmlaunch rehearse llama3-8b.yaml"


def test_a_gpu_says_all_three_peaks_and_that_nccl_is_in_none() -> None:
    one = planned()
    found = records(one, on_gpu(one, 1))
    assert [record["peak_kind"] for record in found] == ["allocated", "reserved", "device"]
    rank = one.plan.estimate.ranks[1]
    assert [record["predicted_bytes"] for record in found] == [
        rank.allocated_bytes,
        rank.reserved_bytes,
        rank.device_bytes,
    ]
    assert all("NCCL's memory is not in it" in record["source"]["note"] for record in found)


def test_a_rank_that_ran_out_has_no_peak_and_says_what_it_had_reached() -> None:
    one = planned()
    (record,) = records(one, on_gpu(one, 0, ran_out=True))
    assert (record["peak_kind"], record["peak_bytes"]) == ("oom", None)
    assert record["observed"]["process_peak_bytes"] == one.plan.estimate.ranks[0].device_bytes


def test_ids_are_unique_and_the_same_for_the_same_rehearsal() -> None:
    one = planned()
    ranks = [on_gpu(one, 0), on_gpu(one, 1), traced(one, 0), traced(one, 1)]
    first = [record["id"] for record in records(one, *ranks)]
    assert len(set(first)) == len(first) == 8
    assert first == [record["id"] for record in records(planned(), *ranks, at=2e9)]
    assert first[-1].split("/")[0::2] == ["rehearsed", "trace", "rank1"]


@pytest.mark.parametrize("kind", ["trace", "gpu"])
def test_priced_again_it_is_predicted_as_the_plan_predicted_it(kind: str) -> None:
    """A trace runs nothing compiled, and yet its record is priced as the plan is: a difference there is one that the
    comparison explains, not one that the formula for the job may be bent to."""
    one = planned()
    for rank in range(one.plan.layout.pipeline):
        for record in records(one, traced(one, rank) if kind == "trace" else on_gpu(one, rank)):
            again = score(record, clusters_by_gpu())
            assert again.supported, again.reason
            assert again.predicted_bytes == record["predicted_bytes"], (rank, record["peak_kind"])


def test_accuracy_shows_them_as_a_family_of_their_own() -> None:
    from llmlaunch.accuracy.scoring import score

    one = planned()
    found = [score(record, clusters_by_gpu()) for record in records(one, traced(one, 0, 1.1))]
    assert list(families(found)) == ["rehearsed/allocated"]


def test_records_come_back_as_the_ranks_they_were() -> None:
    one = planned()
    ranks = (on_gpu(one, 0, ran_out=True), traced(one, 1), on_gpu(one, 3))
    kept = json.loads(json.dumps(records(one, *ranks)))
    assert rehearsed_ranks(kept, shape(), one.recipe, one.plan) == ranks


def test_a_gpu_goes_before_a_trace_and_the_newer_before_the_older() -> None:
    one = planned()
    other = {**VERSIONS, "torch": "2.12.1"}
    older, newer = records(one, traced(one, 0, 1.2), at=1e9), records(one, traced(one, 0, 1.3, versions=other), at=2e9)
    (found,) = rehearsed_ranks([*newer, *older], shape(), one.recipe, one.plan)
    assert found.versions["torch"] == "2.12.1"
    (found,) = rehearsed_ranks([*records(one, on_gpu(one, 0)), *newer], shape(), one.recipe, one.plan)
    assert found.on == "gpu"


@pytest.mark.parametrize(
    "words",
    [
        ("layout.tensor=4", *PINS[1:]),
        (*PINS[:2], "layout.micro_batch_size=2", *PINS[3:]),
        (*PINS, "training.sequence_length=4096"),
        (*PINS, "layout.recompute=full"),
        (*PINS, "nodes=8"),
        (*PINS, "cluster=h200-141gb-x8"),
        (*PINS, "training.gradient_dtype=bf16"),
        (*PINS, 'backend.extra_args=["--my-own-flag"]'),
        (*PINS, "training.global_batch_size=32"),
    ],
)
def test_whatever_memory_depends_on_makes_another_shape(words: tuple[str, ...]) -> None:
    assert shape(*words) != shape()


@pytest.mark.parametrize(
    "words",
    [
        (*PINS, "training.steps=7"),
        (*PINS, "name=another"),
        (*PINS, "training.learning_rate=1.0e-5"),
        (*PINS, "memory.limit=0.7"),
        (*PINS, "training.global_batch_size=2048"),
    ],
)
def test_what_memory_does_not_depend_on_leaves_the_shape(words: tuple[str, ...]) -> None:
    assert shape(*words) == shape()


def test_another_version_of_the_framework_is_another_rehearsal() -> None:
    one = planned()
    kept = records(one, traced(one, 0))
    old = planned(*PINS, 'backend.version="0.16"')
    assert rehearsed_ranks(kept, shape(), old.recipe, one.plan) == ()
    new = planned(*PINS, "backend.version=0.19.0")
    assert len(rehearsed_ranks(kept, shape(), new.recipe, one.plan)) == 1
