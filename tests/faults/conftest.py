"""Fixtures of the node side, shared with the other directory that breaks or watches it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.chain import Chain
from support.node_rig import (  # noqa: F401
    archive,
    cpu_node,
    faulty_disk,
    gpu_node,
    nvml_library,
    old_gpu_node,
    old_nvml_library,
)
from support.side_by_side import asked_for

Make = Callable[..., Chain]


@contextmanager
def maker(library: Path, place: Path) -> Iterator[Make]:
    """What makes a run that is not submitted yet; nothing of it is left in the end."""
    runs: list[Chain] = []

    def make(**more: Any) -> Chain:
        own = place / str(len(runs))
        own.mkdir()
        runs.append(Chain(own, library, **more))
        return runs[-1]

    try:
        yield make
    finally:
        for run in runs:
            run.close()


@pytest.fixture
def chain(nvml_library: Path, tmp_path: Path) -> Iterator[Make]:  # noqa: F811
    with maker(nvml_library, tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def stories(
    request: pytest.FixtureRequest,
    nvml_library: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mapping[str, Future[None]]]:
    """What became of each test that takes a `story`, by the tests' ids. All are begun side by side, since most of their
    time is waiting. A story gets what makes a run, and the number of the repeat."""

    def tell(number: int, story: Callable[[Make, int], None], repeat: int) -> None:
        with maker(nvml_library, tmp_path_factory.mktemp(f"story{number}")) as make:
            story(make, repeat)

    asked = [item for item in asked_for(request, "story").items() if item[0].startswith("tests/faults/")]
    threads = ThreadPoolExecutor(2 * (os.cpu_count() or 1))
    try:
        yield {
            name: threads.submit(tell, number, each["story"], each["repeat"])
            for number, (name, each) in enumerate(asked)
        }
    finally:
        threads.shutdown(cancel_futures=True)
