"""Rehearsals in the store: found again by their shape, replaced by the next one, and taken along by an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store, open_store
from llmlaunch.store.history import last_true_peaks
from llmlaunch.store.location import where
from llmlaunch.store.measurements import (
    Filters,
    contents,
    csv_lines,
    import_file,
    put_rehearsed,
    rehearsed_of,
    write_lines,
)
from support.rehearsed_plans import PINS, on_gpu, planned, records, traced
from support.store_run_dirs import RUN_ID, finished_cpu_run


def test_what_was_rehearsed_is_found_for_this_very_shape_alone(store: Store) -> None:
    one = planned()
    ranks = (traced(one, 0), on_gpu(one, 3, ran_out=True))
    assert put_rehearsed(store, records(one, *ranks)) == 2
    assert rehearsed_of(store, one.recipe, one.plan) == ranks
    other = planned(*PINS, "training.sequence_length=4096")
    assert rehearsed_of(store, other.recipe, other.plan) == ()


def test_rehearsed_again_takes_the_place_of_before(store: Store) -> None:
    one = planned()
    put_rehearsed(store, records(one, traced(one, 0, 1.3), traced(one, 1)))
    assert put_rehearsed(store, records(one, traced(one, 0, 1.3), traced(one, 1))) == 0
    assert put_rehearsed(store, records(one, traced(one, 0, 1.1))) == 1
    assert rehearsed_of(store, one.recipe, one.plan) == (traced(one, 0, 1.1), traced(one, 1))
    assert len(contents(store)) == 2


def test_what_ran_out_before_has_peaks_now_and_the_other_way_about(store: Store) -> None:
    one = planned()
    put_rehearsed(store, records(one, on_gpu(one, 0, ran_out=True), on_gpu(one, 1)))
    assert len(contents(store)) == 4
    put_rehearsed(store, records(one, on_gpu(one, 0), on_gpu(one, 1, ran_out=True)))
    assert rehearsed_of(store, one.recipe, one.plan) == (on_gpu(one, 0), on_gpu(one, 1, ran_out=True))
    assert len(contents(store)) == 4


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_an_export_takes_them_along(store: Store, tmp_path: Path, ending: str) -> None:
    one = planned()
    ranks = (traced(one, 0), on_gpu(one, 3))
    put_rehearsed(store, records(one, *ranks))
    path = tmp_path / f"out.{ending}"
    write_lines(csv_lines(contents(store)) if ending == "csv" else contents(store), path)
    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "other.db")})) as other:
        assert import_file(other, path).added == 4
        assert rehearsed_of(other, one.recipe, one.plan) == ranks
        assert put_rehearsed(other, records(one, *ranks)) == 0  # and is the same rehearsal there


def test_they_are_listed_as_rehearsed_and_are_no_last_true_peak(store: Store) -> None:
    one = planned()
    put_rehearsed(store, records(one, on_gpu(one, 0)))
    assert len(contents(store, Filters(family="rehearsed"))) == 3
    assert last_true_peaks(store, one.recipe.digest, one.recipe.name) is None


def test_a_record_that_only_looks_like_one_does_no_harm(store: Store, tmp_path: Path) -> None:
    one = planned()
    good = records(one, traced(one, 0))
    shape = good[0]["rehearsal"]["shape"]
    bad = [
        {"id": "a", "family": "rehearsed", "rehearsal": {"shape": shape}},
        {"id": "b", "family": "rehearsed", "rehearsal": 7},
        {**good[0], "id": "c", "observed": [], "pipeline_rank": "x"},
    ]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(each) + "\n" for each in bad))
    import_file(store, tmp_path / "bad.jsonl")
    put_rehearsed(store, good)
    assert rehearsed_of(store, one.recipe, one.plan) == (traced(one, 0),)


def test_not_even_one_that_names_a_run_is_its_last_true_peak(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    collect(store, [run.path])
    one = planned()
    put_rehearsed(
        store, [{**record, "run_id": RUN_ID, "attempt": "9"} for record in records(one, on_gpu(one, 0), at=2e9)]
    )
    past = last_true_peaks(store, "d1", "tiny")
    assert past is not None
    assert {peak.peak_kind for peak in past.peaks} == {"resident"}
