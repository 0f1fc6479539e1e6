"""One real SLURM cluster of 11 nodes for the whole session, and others for those who ask for them.

`slurm` is what a test takes: the cluster, with SLURM_CONF set so that sbatch, squeue and llmlaunch find it. What must
hold as root and as a normal user, where a site enforces its limits and where it does not, takes `anyone`: a person with
a cluster of his own, in each of these four ways; or `anyone_at_both_ends`, in the two of them that differ in both.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from one_machine import Cluster, install, new_cluster, throw_away
from person import Person, as_normal_user, at_home

WAYS = ["root-enforced", "user-default", "root-default", "user-enforced"]


@pytest.fixture(scope="session")
def slurm_packages() -> None:
    """SLURM's Debian packages without accounting; fails with the line to type where they cannot be installed."""
    install()


@pytest.fixture(scope="session")
def slurm_cluster(slurm_packages: None) -> Iterator[Cluster]:
    """11 nodes, so that node10 and node11 come after node9; no accounting."""
    cluster = new_cluster({"CPUS": "4"})
    try:
        cluster.do("up", "11")
        yield cluster
    finally:
        throw_away(cluster)


@pytest.fixture
def slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The session's cluster, found by every SLURM command of this test; its jobs are cancelled afterwards."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    yield slurm_cluster
    slurm_cluster.ask("scancel", "--me")


@contextmanager
def person_with_a_cluster(way: str, nodes: int) -> Iterator[Person]:
    """`way` is one of WAYS: who, and the site's limits."""
    who, limits = way.split("-")
    prefix = as_normal_user() if who == "user" else ()
    cluster = replace(new_cluster({"CPUS": "4", "LIMITS": limits, "GRACE_SECONDS": "20"}), prefix=prefix)
    # The checkout may lie where nobody may look.
    scripts = shutil.copytree(cluster.script.parent, cluster.directory.parent / "scripts")
    cluster = replace(cluster, script=scripts / "cluster.sh")
    try:
        cluster.do("up", str(nodes))
        yield at_home(cluster, prefix)
    finally:
        throw_away(cluster)


@pytest.fixture(scope="module", params=WAYS)
def anyone(request: pytest.FixtureRequest, slurm_packages: None) -> Iterator[Person]:
    """Three nodes."""
    with person_with_a_cluster(request.param, 3) as person:
        yield person


@pytest.fixture(scope="module", params=WAYS[:2])
def anyone_at_both_ends(request: pytest.FixtureRequest, slurm_packages: None) -> Iterator[Person]:
    """Eleven nodes, for many jobs side by side."""
    with person_with_a_cluster(request.param, 11) as person:
        yield person
