"""What sites set differently: they describe themselves, and bind tasks to CPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_machine import running_cluster
from person import Person, at_home
from test_cluster import requeue_of
from training import backend, submit

from llmlaunch.cluster.load import load_cluster

pytestmark = pytest.mark.slurm

COUNTS_ITS_CPUS = "import os, pathlib\npathlib.Path('cpus').write_text(str(len(os.sched_getaffinity(0))))\n"


def test_the_drafted_profile_describes_the_cluster(person: Person) -> None:
    person.llmlaunch("init", "--site", "ours", code=0)
    cluster = load_cluster("./ours.yaml", person.home)
    assert (cluster.accelerator.name, cluster.devices_per_node, cluster.cpus_per_node) == ("h100-80gb", 8, 4)
    assert cluster.host_memory_bytes == 62 * 2**30
    assert (cluster.slurm["partition"], cluster.gpu_request) == ("train", "gpus-per-node")
    assert "ours.yaml exists" in person.llmlaunch("init", "--site", "ours", code=2).stderr


@pytest.fixture
def bound(slurm_packages: None, tmp_path: Path) -> Iterator[Person]:
    """Who uses two nodes that bind tasks to the machine's own CPUs."""
    with running_cluster(2, AFFINITY="1", REQUEUE="0", GPUS="0") as cluster:
        yield at_home(cluster, tmp_path)


def test_trainers_get_the_cpus_that_the_profile_requests(bound: Person) -> None:
    every = len(os.sched_getaffinity(0))
    assert bound.ask("srun", "-N1", "-n1", "nproc") == "1\n"
    assert [requeue_of(bound.cluster), requeue_of(bound.cluster, "--requeue")] == ["Requeue=0", "Requeue=1"]
    (bound.home / "trainer.py").write_text(COUNTS_ITS_CPUS)
    words = (f"cluster={{base: cpu-x1, cpus_per_node: {every}}}", backend(bound.home / "trainer.py"), "--follow")
    training = submit(bound, bound.home, *words)
    assert (training.run / "cpus").read_text() == str(every)
