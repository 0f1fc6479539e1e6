"""One real SLURM cluster of 11 nodes for the whole session, and others for those who ask for them.

`slurm` is what a test takes: the cluster, with SLURM_CONF set so that sbatch, squeue and llmlaunch find it. What must
hold as root and as a normal user, where a site enforces its limits and where it does not, takes `anyone`: a person with
a cluster of his own, in each of these four ways; or `anyone_at_both_ends`, in the two of them that differ in both.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
from one_machine import Cluster, install, new_cluster, throw_away, what_it_says
from person import BOTH_ENDS, WAYS, Person, person_with_a_cluster


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


@pytest.fixture(scope="module", params=WAYS)
def anyone(request: pytest.FixtureRequest, slurm_packages: None) -> Iterator[Person]:
    """Three nodes."""
    with person_with_a_cluster(request.param, 3) as person:
        yield person


@pytest.fixture(scope="module", params=BOTH_ENDS)
def anyone_at_both_ends(request: pytest.FixtureRequest, slurm_packages: None) -> Iterator[Person]:
    """Eleven nodes, for many jobs side by side."""
    with person_with_a_cluster(request.param, 11) as person:
        yield person


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failed test shows what its clusters say: they are gone when someone reads of it."""
    report = yield
    if report.failed and report.when == "call":
        for value in getattr(item, "funcargs", {}).values():
            cluster = value.cluster if isinstance(value, Person) else value
            if isinstance(cluster, Cluster):
                report.sections.append((f"the cluster below {cluster.directory}", what_it_says(cluster)))
    return report
