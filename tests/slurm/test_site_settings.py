"""What sites set differently: limits, requeueing, CPU binding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_machine import running_cluster
from person import Person, at_home
from training import backend, submit

pytestmark = pytest.mark.slurm

COUNTS_ITS_CPUS = "import os, pathlib\npathlib.Path('cpus').write_text(str(len(os.sched_getaffinity(0))))\n"


def test_a_request_that_can_never_run_waits_under_default_limits_and_is_refused_under_enforced_ones(
    anyone: Person,
) -> None:
    days = ("--partition=debug", "--time=30-0", "--hold", "--wrap=true")
    done = anyone.call("sbatch", *days)
    if anyone.cluster.settings["LIMITS"] == "enforced":
        assert done.returncode == 1
        assert "Requested time limit is invalid" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert anyone.ask("squeue", "-h", "-o", "%r").strip() in ("JobHeldUser", "PartitionTimeLimit")


def requeue_of(person: Person, *options: str) -> str:
    job_id = person.ask("sbatch", "--parsable", "--hold", *options, "--wrap=true").strip()
    (word,) = (word for word in person.ask("scontrol", "show", "job", job_id).split() if word.startswith("Requeue="))
    return word


def test_no_job_comes_back_in_the_partition_that_forbids_it(anyone: Person) -> None:
    assert requeue_of(anyone) == requeue_of(anyone, "--requeue") == "Requeue=1"
    assert requeue_of(anyone, "--no-requeue") == requeue_of(anyone, "--requeue", "--partition=once") == "Requeue=0"


@pytest.fixture
def bound(slurm_packages: None, tmp_path: Path) -> Iterator[Person]:
    """Who uses two nodes that bind tasks to the machine's own CPUs."""
    with running_cluster(2, AFFINITY="1", REQUEUE="0", GPUS="0") as cluster:
        yield at_home(cluster, tmp_path)


def test_the_trainers_have_the_cpus_that_the_profile_asks_for(bound: Person) -> None:
    every = len(os.sched_getaffinity(0))
    assert bound.ask("srun", "-N1", "-n1", "nproc") == "1\n"
    assert [requeue_of(bound), requeue_of(bound, "--requeue")] == ["Requeue=0", "Requeue=1"]
    (bound.home / "trainer.py").write_text(COUNTS_ITS_CPUS)
    words = (f"cluster={{base: cpu-x1, cpus_per_node: {every}}}", backend(bound.home / "trainer.py"), "--follow")
    training = submit(bound, bound.home, *words)
    assert (training.run / "cpus").read_text() == str(every)
