"""What a strict site forbids (docs/forbidden.md), on one cluster for all: rules in job_submit.lua, a closed partition,
no requeue, no accounts, homes that are on no node, and jobs whose memory the kernel bounds.

It is root's cluster, and a normal user's jobs, as sites have it; where the tests are not root's, it is one person's.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from handmade import run_directory
from one_machine import Cluster, running_cluster
from person import Person, as_normal_user, at_home, interpreter
from training import FAILS_AFTER_SAVING, script, slow_saver, submit

from llmlaunch.errors import SchedulerRefused
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
from support.side_by_side import by_name

pytestmark = pytest.mark.slurm

PAID = ("slurm.account=proj", 'slurm.time="00:10:00"', "slurm.mem=900M")
# Tells what a trainer on a node finds, once it has tried to write there.
LOOKS_AROUND = """\
import json, os, pathlib, tempfile
names = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME", "CUDA_CACHE_PATH", "MPLCONFIGDIR")
places = [*(os.environ[name] for name in names), str(pathlib.Path.home()), tempfile.gettempdir()]
for place in places:
    pathlib.Path(place, "written-by-a-test").touch()
pathlib.Path("found." + os.environ["RANK"]).write_text(json.dumps(places))
"""
FILLS_ITS_MEMORY = """\
print("step 1/100 | loss 1.0 | 0.50 s/step | 1000 tokens/s", flush=True)
held = bytearray()
while len(held) < 1 << 31:
    held += bytes([1]) * (16 << 20)
print("it was never stopped", flush=True)
"""


@pytest.fixture(scope="module")
def strict(slurm_packages: None) -> Iterator[Cluster]:
    with running_cluster(3, CPUS="4", GPUS="0", STRICT="1", CGROUPS="1") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def user(strict: Cluster) -> Person:
    """A normal user, whose jobs have nothing of root's but another interpreter."""
    person = at_home(strict, strict.directory.parent / "home", as_normal_user())
    python = shutil.which("python3", path="/usr/bin") or sys.executable
    stand_in = person.folder("stand-in")
    (stand_in / "torch").mkdir()  # ranks want an interpreter that has torch
    (stand_in / "torch" / "__init__.py").touch()
    own = interpreter(Path(person.python), python)
    own.write_text(own.read_text().replace("\nexec ", f"\nPYTHONPATH={stand_in} exec "))
    return person


@pytest.mark.parametrize(
    ("options", "words", "mend"),
    [
        ([], "say which project pays: --account", " -- --account=NAME"),
        (["--account=proj"], "say how long it takes: --time", " -- --time=HH:MM:SS"),
        (["--account=proj", "--time=5", "--nodes=3"], "no job gets more than 2 nodes", "sinfo -o"),
        (["--account=proj", "--time=5", "--exclusive"], "no job gets them whole", "slurm: {exclusive: false}"),
    ],
)
def test_a_refusal_by_the_site_says_how_to_comply(
    strict: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str, mend: str
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(strict.conf))
    with pytest.raises(SchedulerRefused) as refusal:
        SlurmLauncher().submit(run_directory(tmp_path / "run", "finish 0"), options)
    assert words in str(refusal.value)
    assert mend in str(refusal.value)


def a_closed_partition_is_reported_as_restricted(user: Person) -> None:
    if not user.prefix:
        return  # the one person of a cluster is its administrator, too
    refused = submit(user, user.folder("closed"), *PAID, "slurm.partition=closed", code=4).said.stderr
    assert "this SLURM has no partition closed that you may use" in refused
    assert "User's group not permitted to use this partition. Name a partition that you may use" in refused


def two_nodes_train_without_a_home_and_without_ssh(user: Person) -> None:
    folder = user.folder("trained")
    for name in ("ssh", "pdsh", "rsh"):
        (folder / name).write_text(f"#!/bin/sh\necho {name} >>{folder}/called\nexit 1\n")
        (folder / name).chmod(0o755)
    # Of a batch script's own TMPDIR SLURM makes /tmp where it cannot be made.
    gone = {"HOME": "/nowhere/user", "TMPDIR": "/nowhere/tmp", "TRITON_CACHE_DIR": "/nowhere/triton"}
    path = f"{folder}:{user.cluster.environment['PATH']}"
    training = script(user, folder, LOOKS_AROUND, *PAID, "nodes=2", PATH=path, **gone)
    assert f"this site does not put job {training.job} back into the queue (Requeue=0)" in training.said.stderr
    training.wait_for_end()
    assert training.phase()["phase"] == "succeeded", training.log()
    places = [json.loads((training.run / f"found.{rank}").read_text()) for rank in "01"]
    assert not [place for each in places for place in each if place.startswith("/nowhere")]
    assert "HOME is /nowhere/user, which is not on this node" in training.log()
    assert not (folder / "called").exists()


def a_job_that_is_not_requeued_ends_and_says_how_to_resume(user: Person) -> None:
    words = ("restart={times: 2, backoff_seconds: 0, within: queue}", *PAID)
    training = script(user, user.folder("ended"), FAILS_AFTER_SAVING, *words)
    training.wait_for_end()
    said = " ".join(user.llmlaunch("status", training.run, code=0).stdout.split())
    assert "exited with 3" in said
    assert "SLURM did not put it back into the queue" in said
    assert "llmlaunch resume ended/run # go on from the last checkpoint" in said


def a_job_killed_by_the_kernel_for_its_memory_reports_the_limit(user: Person) -> None:
    training = script(user, user.folder("large"), FILLS_ITS_MEMORY, *PAID, "restart=none")
    training.wait_for_end()
    if not _has_cgroups(user):
        assert "it was never stopped" in training.log()
        return
    cause = training.status()["cause"]
    assert cause["kind"] == "host_oom", training.status()
    assert cause["numbers"]["limit_bytes"] == 900 << 20
    assert "it was never stopped" not in training.log()
    assert "out of main memory" in training.phase()["reason"]


def trainers_save_where_only_the_first_process_of_a_task_is_signalled(user: Person) -> None:
    training = slow_saver(user, user.folder("cancelled"), *PAID, "nodes=2", steps=1000, save_seconds=1.0)
    training.wait_for_step(2)
    user.llmlaunch("cancel", training.run, code=0)
    training.wait_for_end()
    assert training.saved_step() >= 2
    assert training.phase()["phase"] == "cancelled"
    assert training.times_told() == {0: 1, 1: 1}


def a_failed_training_restarts_within_the_memory_of_its_allocation(user: Person) -> None:
    words = ("nodes=2", "restart={times: 1, backoff_seconds: 0}", *PAID)
    training = script(user, user.folder("again"), FAILS_AFTER_SAVING, *words)
    training.wait_for_end()
    assert training.steps() == [1, 2, 3, 4], training.log()
    assert training.attempts() == [f"{training.job}.0", f"{training.job}.1"]


def _has_cgroups(user: Person) -> bool:
    return (user.cluster.directory / "etc" / "cgroup.conf").exists()


STORIES = by_name(
    two_nodes_train_without_a_home_and_without_ssh,
    a_job_killed_by_the_kernel_for_its_memory_reports_the_limit,
    a_job_that_is_not_requeued_ends_and_says_how_to_resume,
    trainers_save_where_only_the_first_process_of_a_task_is_signalled,
    a_failed_training_restarts_within_the_memory_of_its_allocation,
    a_closed_partition_is_reported_as_restricted,
)


@pytest.fixture(scope="module")
def told(user: Person) -> Iterator[Mapping[str, Future[None]]]:
    with ThreadPoolExecutor(len(STORIES)) as threads:
        yield {name: threads.submit(story, user) for name, story in STORIES.items()}


@pytest.mark.parametrize("name", STORIES)
def test_forbidden(told: Mapping[str, Future[None]], strict: Cluster, name: str) -> None:
    told[name].result()
