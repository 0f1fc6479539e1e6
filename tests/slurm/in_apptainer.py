"""Runs in real Apptainer containers. tests/releases/test_releases.py runs these where there is Apptainer, in another
release, and names the image: a folder with bash and a Python without torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from person import Person, person_with_a_cluster
from training import Training, slow_saver

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def person() -> Iterator[Person]:
    with person_with_a_cluster("root-enforced", 2) as person:
        yield person


def in_container(person: Person, folder: Path, *words: str, **trainer: float) -> Training:
    """A training in the image, with the interpreter and its virtual environment mounted."""
    folder.mkdir()
    image = os.environ["LLMLAUNCH_TEST_IMAGE"]
    mounts = json.dumps([f"{place}:{place}" for place in os.environ["LLMLAUNCH_TEST_PLACES"].split(":")])
    container = f"container={{image: {image}, runtime: apptainer, mounts: {mounts}}}"
    return slow_saver(person, folder, container, f"python={sys.executable}", *words, **trainer)  # type: ignore[arg-type]


def assert_both_ranks_are_known(training: Training) -> None:
    ranks = training.status()["ranks"]
    assert [(rank["rank"], rank["exit_code"]) for rank in ranks] == [(0, 0), (1, 0)]
    last = [json.loads(path.read_text().splitlines()[-1]) for path in sorted(training.run.glob("peaks/*.jsonl"))]
    peaks = {process["rank"]: process["resident_peak_bytes"] for line in last for process in line["processes"]}
    assert [line["event"] for line in last] == ["end", "end"]
    assert set(peaks) == {0, 1}
    assert min(peaks.values()) > 2**20  # the interpreter alone has several MiB


def test_a_run_on_two_nodes_ends_well_with_its_peaks_and_exit_codes(person: Person) -> None:
    training = in_container(person, person.home / "trains", "nodes=2", steps=3)
    training.wait_for_end()
    assert training.phase()["phase"] == "succeeded", training.log()
    assert_both_ranks_are_known(training)


def test_a_cancelled_run_saves_before_it_ends(person: Person) -> None:
    training = in_container(person, person.home / "cancelled", "nodes=2", steps=1000, save_seconds=3)
    training.wait_for_step(2)
    assert person.llmlaunch("cancel", str(training.run)).returncode == 0
    training.wait_for_end()
    assert training.saved_step() >= 2, training.log()
    assert training.log().count("saving step") == 1
    assert training.phase()["phase"] == "cancelled"


def test_a_run_out_of_time_saves_once_and_comes_back(person: Person) -> None:
    """The signal before the time limit, as SLURM sends it: Apptainer delivers it twice to each process."""
    training = in_container(person, person.home / "limit", "nodes=2", steps=1000, save_seconds=3)
    training.wait_for_step(2)
    person.ask("scancel", "--batch", "--signal=USR1", training.job)
    training.wait(lambda it: it.status("0"), "the first attempt has ended")
    assert training.log("0").count("saving step") == 1, training.log("0")
    assert training.saved_step() >= 2
    assert {rank["exit_code"] for rank in training.status("0")["ranks"]} == {0}
    person.llmlaunch("cancel", str(training.run))
