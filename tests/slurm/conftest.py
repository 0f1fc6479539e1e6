"""One real SLURM cluster of 11 nodes for the whole session, and others for those who ask for them.

`slurm` is what a test takes: the cluster, with SLURM_CONF set so that sbatch, squeue and llmlaunch find it. What mostly
waits is a story, told side by side with its module's.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster, install, running_cluster, what_it_says
from person import Person, at_home, person_with_a_cluster

from support.side_by_side import asked_for

SIDE_BY_SIDE = 8  # stories of one module on the session's cluster: two nodes with a process each


@pytest.fixture(scope="session")
def slurm_packages() -> None:
    """SLURM's Debian packages without accounting; fails with the line to type where they cannot be installed."""
    install()


@pytest.fixture(scope="session")
def slurm_cluster(slurm_packages: None) -> Iterator[Cluster]:
    """11 nodes, so that node10 and node11 come after node9; no accounting."""
    with running_cluster(11, CPUS="4") as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The session's cluster, found by every SLURM command of this test; its jobs are cancelled afterwards."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    yield slurm_cluster
    slurm_cluster.ask("scancel", "--me")


@pytest.fixture
def person(slurm: Cluster, tmp_path: Path) -> Person:
    """Who uses the session's cluster, at home in the test's folder."""
    return at_home(slurm, tmp_path)


@pytest.fixture(scope="session")
def breakable(slurm_packages: None) -> Iterator[Cluster]:
    with running_cluster(1, CPUS="2", GPUS="0") as cluster:
        yield cluster


@pytest.fixture
def alone(breakable: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of one node, whose controller a test may stop and kill; it runs again afterwards, without jobs."""
    monkeypatch.setenv("SLURM_CONF", str(breakable.conf))
    yield breakable
    if not breakable.daemons("slurmctld"):
        breakable.start_controller()
    breakable.wait_until_whole()
    breakable.ask("scancel", "--me")


@pytest.fixture(scope="module")
def stories(
    slurm_packages: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[None]]]:
    """What became of each test of the module that takes a `story`, by the tests' ids. All are begun, since most of
    their time is waiting. A story gets someone with a home of his own, who uses the session's cluster; in a test that
    takes a `site`, the one person of eleven nodes of that site."""
    asked = asked_for(request, "story")
    sites = {parameters.get("site") for parameters in asked.values()}
    cluster = request.getfixturevalue("slurm_cluster") if None in sites else None
    homes = tmp_path_factory.mktemp(request.path.stem)
    with ExitStack() as stack:
        settings = getattr(request.module, "SETTINGS", {})
        people = {
            site: stack.enter_context(person_with_a_cluster(site, 11, **settings)) for site in sorted(sites - {None})
        }

        def tell(number: int, parameters: dict[str, Any]) -> None:
            person = people.get(parameters.get("site")) or at_home(cluster, homes / str(number))
            try:
                parameters["story"](person)
            except BaseException as error:  # the cluster may be gone when someone reads of it
                raise AssertionError(f"{error}\n\nthe cluster\n{what_it_says(person.cluster)}") from error

        with ThreadPoolExecutor(getattr(request.module, "SIDE_BY_SIDE", SIDE_BY_SIDE)) as threads:
            yield {name: threads.submit(tell, number, each) for number, (name, each) in enumerate(asked.items())}
            threads.shutdown(cancel_futures=True)
        if cluster:
            cluster.ask("scancel", "--me")


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
