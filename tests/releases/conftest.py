"""Newer SLURM and real Apptainer, as other Debian releases package them: entered, not installed.

Each release has one cluster for the whole session. A test's story is told on it side by side with all others, of both
releases: most of its time is waiting, for SLURM's own clocks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "slurm"))

from debian import APPTAINER, SLURM, entered, unpack
from newer_site import Site, cluster_inside
from one_machine import what_it_says

from support.side_by_side import asked_for

# What is unpacked, by which name.
SUITES = {"trixie": ("slurm", SLURM), "sid": ("containers", APPTAINER)}
SIDE_BY_SIDE = 14  # stories: a node or two each, with processes that mostly sleep


@pytest.fixture(scope="session")
def sites(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Site]]:
    """By the suites that tests ask for."""
    if os.getuid() != 0:
        pytest.fail("entering another release takes root (unshare, pivot_root)")
    suites = {parameters["suite"] for parameters in asked_for(request, "suite").values()}
    folder = tmp_path_factory.mktemp("releases")
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def open_site(suite: str) -> Site:
            name, packages = SUITES[suite]
            release = unpack(suite, name, packages)
            program = stack.enter_context(entered(release, folder))
            return Site(release, stack.enter_context(cluster_inside(program)), program)

        yield dict(zip(sorted(suites), threads.map(open_site, sorted(suites)), strict=True))


@pytest.fixture(scope="session")
def stories(request: pytest.FixtureRequest, sites: Mapping[str, Site]) -> Iterator[Mapping[str, Future[None]]]:
    """What became of each test's story, by the tests' ids. All are begun in their order."""

    def tell(site: Site, name: str, story: Callable[[Site, str], None]) -> None:
        try:
            story(site, name)
        except BaseException as error:  # the cluster may be gone when someone reads of it
            raise AssertionError(f"{error}\n\n{site.release}\nthe cluster\n{what_it_says(site.cluster)}") from error

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        yield {
            nodeid: threads.submit(tell, sites[asked["suite"]], f"home{number}", asked["story"])
            for number, (nodeid, asked) in enumerate(asked_for(request, "suite").items())
        }
        threads.shutdown(cancel_futures=True)
