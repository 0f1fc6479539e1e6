"""The project's own tests under newer SLURM, and in real Apptainer containers, as Debian packages them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SLURM_TESTS = (
    "tests/slurm/test_site.py",
    "tests/slurm/test_rendered_runs.py",
    "tests/slurm/test_life.py::test_life[a_preempted_job_saves_in_its_grace_time_and_comes_back-root-enforced]",
    "tests/slurm/test_life.py::test_life[a_cancelled_job_saves_and_stays_away-root-enforced]",
)

pytestmark = pytest.mark.releases


@pytest.mark.parametrize("suite", ["trixie", "sid"])
def test_sites_runs_and_lives_under_a_newer_slurm(suite: str, release: Callable[..., Any]) -> None:
    packages = ("apptainer", "squashfs-tools") if suite == "sid" else ()
    there = release(suite, *packages)
    assert " passed" in there.test(*SLURM_TESTS)


def test_runs_in_real_apptainer_containers(release: Callable[..., Any]) -> None:
    """Sid has Apptainer; the containers' image is trixie, with a Python of its own."""
    image = release("trixie").root
    assert " passed" in release("sid", "apptainer", "squashfs-tools").test(
        "tests/slurm/in_apptainer.py", places=(str(image),), LLMLAUNCH_TEST_IMAGE=str(image)
    )
