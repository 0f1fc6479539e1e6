"""What sites set differently: requeueing and CPU binding."""

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


def requeue_of(person: Person, *options: str) -> str:
    job_id = person.ask("sbatch", "--parsable", "--hold", *options, "--wrap=true").strip()
    (word,) = (word for word in person.ask("scontrol", "show", "job", job_id).split() if word.startswith("Requeue="))
    return word


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
