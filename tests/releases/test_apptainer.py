"""Jobs in real Apptainer containers, of root and of a normal user, on sid's SLURM.

The image is another Debian, without torch: the interpreter that trains and its environment are mounted. Root's is a
file (.sif), the normal user's the folder that file was made of: without /dev/fuse he cannot mount a file.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys

import pytest
from debian import SYSTEM, project_places, unpack
from newer_site import Site
from person import Person
from training import QUICKSTART, Training, slow_saver

from support.side_by_side import side_by_side

pytestmark = pytest.mark.releases


def folder() -> str:
    return str(unpack("trixie", "image", SYSTEM).root)


def container(person: Person, image: str) -> str:
    mounts = json.dumps([f"{place}:{place}" for place in [*project_places(), str(person.home)]])
    return f"container={{image: {image}, runtime: apptainer, mounts: {mounts}}}"


def a_normal_users_job_out_of_time_saves_once_and_comes_back_and_when_cancelled_saves_once(
    site: Site, home: str
) -> None:
    """The signal before the time limit, as SLURM sends it: Apptainer delivers it twice to each process."""
    person = site.person(home, normal=True)
    words = (container(person, folder()), "nodes=2")
    training = slow_saver(person, person.home, *words, steps=2000, save_seconds=1, step_seconds=0.5)
    training.wait_for_step(2)
    person.ask("scancel", "--batch", "--signal=USR1", training.job)
    training.wait(lambda it: it.status("0"), "the first attempt has ended")
    assert_saved_once(training, "0")
    saved = training.saved_step()
    training.wait_for_step(saved + 1, "1")
    assert f"resumed after step {saved}\n" in training.log("1")
    person.llmlaunch("cancel", training.run, code=0)
    training.wait_for_end()
    assert_saved_once(training, "1")
    assert training.saved_step() > saved
    assert training.phase()["phase"] == "cancelled", training.log()
    assert_both_ranks_are_measured(training)


def assert_saved_once(training: Training, attempt: str) -> None:
    assert training.log(attempt).count("saving step") == 1, training.log(attempt)
    assert training.times_told(attempt) == {0: 1, 1: 1}
    assert {rank["exit_code"] for rank in training.status(attempt)["ranks"]} == {0}


def assert_both_ranks_are_measured(training: Training) -> None:
    ranks = training.status()["ranks"]
    assert [(rank["rank"], rank["exit_code"]) for rank in ranks] == [(0, 0), (1, 0)]
    nodes = sorted({rank["node"] for rank in ranks})  # an earlier attempt may have had others
    last = [json.loads((training.run / "peaks" / f"{node}.jsonl").read_text().splitlines()[-1]) for node in nodes]
    peaks = {process["rank"]: process["resident_peak_bytes"] for line in last for process in line["processes"]}
    assert [line["event"] for line in last] == ["end", "end"]
    assert set(peaks) == {0, 1}
    assert min(peaks.values()) > 2**20  # the interpreter alone has several MiB


def a_recipes_container_is_inspected_on_a_node_and_remembered(site: Site, home: str) -> None:
    """`llmlaunch doctor --container`: the interpreter inside and what it finds are real."""
    person = site.person(home)
    recipe = person.home / "recipe.yaml"
    image = person.home / "image.sif"  # not compressed, it is ready in a second
    person.ask("apptainer", "build", "--mksquashfs-args", "-noI -noD -noF -noX", str(image), folder())
    box = container(person, str(image)).removeprefix("container=")
    recipe.write_text(f"{QUICKSTART.read_text()}\npython: {sys.executable}\ncontainer: {box}\n")
    said = person.llmlaunch("doctor", "--container", recipe, code=0, OMP_NUM_THREADS="1").stdout
    deepspeed = importlib.metadata.version("deepspeed")
    assert f"deepspeed           {deepspeed}\n" in said
    assert re.search(r" on node\d$", said.splitlines()[0]), said
    checked = person.llmlaunch("check", "-v", recipe, code=0).stdout
    assert f"Assumed: DeepSpeed {deepspeed}, as llmlaunch doctor saw" in checked


test_apptainer = side_by_side(
    a_normal_users_job_out_of_time_saves_once_and_comes_back_and_when_cancelled_saves_once,
    a_recipes_container_is_inspected_on_a_node_and_remembered,
)
