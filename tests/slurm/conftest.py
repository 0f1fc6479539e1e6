"""One real SLURM cluster of 11 nodes for the whole session.

`slurm` is what a test takes: the cluster, with SLURM_CONF set so that sbatch, squeue and llmlaunch find it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from one_machine import Cluster, install, new_cluster, throw_away


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
