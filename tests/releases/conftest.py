"""Newer SLURM and real Apptainer, as Debian sid packages them: entered, not installed.

The release has one cluster for the whole session. All stories are told on it side by side: most of their time is
waiting, for SLURM's own clocks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "slurm"))

from debian import APPTAINER, entered, unpack
from newer_site import Site, cluster_inside
from one_machine import what_it_says

from support.side_by_side import asked_for

SIDE_BY_SIDE = 8  # stories: a node or two each, with processes that mostly sleep


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.getuid() != 0:
        pytest.fail("entering another release takes root (unshare, pivot_root)")
    release = unpack("sid", "containers", APPTAINER)
    with entered(release, tmp_path_factory.mktemp("releases")) as program, cluster_inside(program) as cluster:
        yield Site(release, cluster, program)


@pytest.fixture(scope="session")
def stories(request: pytest.FixtureRequest, site: Site) -> Iterator[Mapping[str, Future[None]]]:
    """What became of each test's story, by the tests' ids. All are begun in their order."""

    def tell(name: str, story: Callable[[Site, str], None]) -> None:
        try:
            story(site, name)
        except BaseException as error:  # the cluster may be gone when someone reads of it
            raise AssertionError(f"{error}\n\n{site.release}\nthe cluster\n{what_it_says(site.cluster)}") from error

    asked = [item for item in asked_for(request, "story").items() if item[0].startswith("tests/releases/")]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        yield {
            nodeid: threads.submit(tell, f"home{number}", each["story"]) for number, (nodeid, each) in enumerate(asked)
        }
        threads.shutdown(cancel_futures=True)
