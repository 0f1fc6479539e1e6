"""Jobs in real Apptainer containers, of root and of a normal user, on sid's SLURM.

The image is another Debian, without torch: the interpreter that trains and its environment are mounted. Root's is a
file (.sif), the normal user's the folder that file was made of: without /dev/fuse he cannot mount a file.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Mapping
from concurrent.futures import Future

import pytest
from debian import SYSTEM, project_places, unpack
from newer_site import Site
from person import Person
from test_newer_slurm import comes_back_from_its_checkpoint
from training import HERE, QUICKSTART, Training, backend, slow_saver, submit

from support.side_by_side import Story, by_name

pytestmark = pytest.mark.releases

HANGS_SECONDS = 10


def image(site: Site) -> str:
    """The file, made once: not compressed, it is ready in a second."""

    def build() -> str:
        file = site.cluster.directory.parent / "image.sif"
        site.person("builder").ask(
            "apptainer", "build", "--mksquashfs-args", "-noI -noD -noF -noX", str(file), folder()
        )
        return str(file)

    built: str = site.share("image", build)
    return built


def folder() -> str:
    return str(unpack("trixie", "image", SYSTEM).root)


def container(person: Person, image: str) -> str:
    mounts = json.dumps([f"{place}:{place}" for place in [*project_places(), str(person.home)]])
    return f"container={{image: {image}, runtime: apptainer, mounts: {mounts}}}"


def in_container(person: Person, image: str, *words: str, steps: int = 2000, save_seconds: float = 1) -> Training:
    """A training of two nodes in the image, which needs no torch."""
    words = (container(person, image), "nodes=2", *words)
    return slow_saver(person, person.home, *words, steps=steps, save_seconds=save_seconds, step_seconds=0.5)


def assert_both_ranks_are_known(training: Training) -> None:
    ranks = training.status()["ranks"]
    assert [(rank["rank"], rank["exit_code"]) for rank in ranks] == [(0, 0), (1, 0)]
    nodes = sorted({rank["node"] for rank in ranks})  # an earlier attempt may have had others
    last = [json.loads((training.run / "peaks" / f"{node}.jsonl").read_text().splitlines()[-1]) for node in nodes]
    peaks = {process["rank"]: process["resident_peak_bytes"] for line in last for process in line["processes"]}
    assert [line["event"] for line in last] == ["end", "end"]
    assert set(peaks) == {0, 1}
    assert min(peaks.values()) > 2**20  # the interpreter alone has several MiB


def the_quickstart_trains_with_deepspeed_and_its_peak_is_collected(site: Site, home: str) -> None:
    person = site.person(home)
    words = (container(person, image(site)), f"python={sys.executable}", "training.steps=4", "--follow")
    training = submit(person, person.home, *words)
    assert "step 4/4 | loss" in training.said.stdout
    (record,) = [record for record in person.measurements() if record["peak_kind"] == "resident"]
    assert record["peak_bytes"] > 2**27  # torch's alone
    assert record["run_state"] == "succeeded"


def a_hang_is_noticed_explained_and_ended_and_the_training_comes_back(site: Site, home: str) -> None:
    person = site.person(home)
    saves = person.home / "checkpoints"
    words = (
        f"training.checkpoint_path={saves}", "training.save_interval=10", "training.steps=30",
        f"watchdog={{floor_seconds: {HANGS_SECONDS}, first_step_seconds: 300}}", 'slurm.time="00:10:00"',
        "restart={backoff_seconds: 1, within: queue}",
    )  # fmt: skip
    trainer = backend(HERE / "hangs_once.py", saves, 30)
    training = submit(person, person.home, trainer, container(person, image(site)), "nodes=2", *words)
    training.wait(lambda it: "iter 1" in it.log(), "it trains")  # other stories may have the nodes until then
    training.wait(lambda it: it.status("0"), "the first attempt has ended")
    status = training.status("0")
    assert (status["state"], status["cause"]["kind"], status["next"]["action"]) == ("failed", "hung", "requeue")
    assert "in hangs_here (hangs_once.py line 19)" in status["cause"]["line"]
    training.wait(lambda it: it.status().get("state") == "succeeded", "the second attempt has succeeded")
    assert training.of_attempt("1", "attempt.json")["from_step"] == 10


def out_of_time_it_saves_once_and_comes_back(site: Site, home: str) -> None:
    """The signal before the time limit, as SLURM sends it: Apptainer delivers it twice to each process."""
    person = site.person(home)
    training = in_container(person, image(site))
    training.wait_for_step(2)
    person.ask("scancel", "--batch", "--signal=USR1", training.job)
    comes_back_from_its_checkpoint(training)
    assert training.log("0").count("saving step") == 1, training.log("0")
    assert {rank["exit_code"] for rank in training.status("0")["ranks"]} == {0}


def cancelled_it_saves_before_it_ends(site: Site, home: str) -> None:
    person = site.person(home)
    training = in_container(person, image(site))
    training.wait_for_step(2)
    person.llmlaunch("cancel", training.run, code=0)
    training.wait_for_end()
    assert training.saved_step() >= 2, training.log()
    assert training.log().count("saving step") == 1
    assert training.times_told() == {0: 1, 1: 1}
    assert training.phase()["phase"] == "cancelled"


def a_normal_users_run_ends_well_with_its_peaks_and_exit_codes(site: Site, home: str) -> None:
    person = site.person(home, normal=True)
    training = in_container(person, folder(), steps=3)
    training.wait_for_end()
    assert training.phase()["phase"] == "succeeded", training.log()
    assert_both_ranks_are_known(training)


def a_normal_users_run_saves_and_comes_back(site: Site, home: str) -> None:
    person = site.person(home, normal=True)
    training = in_container(person, folder())
    training.wait_for_step(2)
    person.ask("scancel", "--batch", "--signal=USR1", training.job)
    comes_back_from_its_checkpoint(training)
    assert training.log("0").count("saving step") == 1, training.log("0")
    assert_both_ranks_are_known(training)


def a_recipes_container_is_looked_into_on_a_node(site: Site, home: str) -> None:
    """`llmlaunch doctor --container`."""
    person = site.person(home)
    recipe = person.home / "recipe.yaml"
    box = container(person, image(site)).removeprefix("container=")
    recipe.write_text(f"{QUICKSTART.read_text()}\npython: {sys.executable}\ncontainer: {box}\n")
    said = person.llmlaunch("doctor", "--container", recipe, code=0, OMP_NUM_THREADS="1").stdout
    assert f"deepspeed           {importlib.metadata.version('deepspeed')}\n" in said
    assert re.search(r" on node\d$", said.splitlines()[0]), said


# Those that wait longest begin first.
LIVES = by_name(
    a_hang_is_noticed_explained_and_ended_and_the_training_comes_back,
    out_of_time_it_saves_once_and_comes_back,
    a_normal_users_run_saves_and_comes_back,
    the_quickstart_trains_with_deepspeed_and_its_peak_is_collected,
    cancelled_it_saves_before_it_ends,
    a_normal_users_run_ends_well_with_its_peaks_and_exit_codes,
    a_recipes_container_is_looked_into_on_a_node,
)


@pytest.mark.parametrize("suite", ["sid"])
@pytest.mark.parametrize("story", LIVES.values(), ids=LIVES)
def test_apptainer(
    stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, suite: str, story: Story
) -> None:
    stories[request.node.nodeid].result()
