"""The pages on a first real job, typed where there is a SLURM: up to what needs real GPUs, all of it works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from one_machine import Cluster, running_cluster

from support.command_line import data_folders
from support.snippets import DOCS, walk

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def gpu_cluster(slurm_packages: None) -> Iterator[Cluster]:
    """Eight nodes that claim eight H100 and the host memory of such machines."""
    with running_cluster(8, CPUS="128", MEMORY_MIB="2000000") as cluster:
        yield cluster


@pytest.mark.parametrize("page", ["first-megatron-job.md", "first-deepspeed-job.md"])
def test_the_page_on_a_first_job_works_up_to_the_dry_run(
    gpu_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(gpu_cluster.conf))
    walk(DOCS / page, tmp_path, ("here", "slurm"), **data_folders(tmp_path))
    assert "h100" in (tmp_path / "ours.yaml").read_text("utf-8")
    assert not (tmp_path / "runs").exists(), "nothing was submitted"
