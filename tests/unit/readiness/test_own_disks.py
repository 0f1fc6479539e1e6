"""A folder that all nodes must share and that lies on a node's own disk is warned of on the first screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.readiness.written_folders import OWN_DISK
from support.command_line import CommandLine

LOCAL = Path(__file__).resolve().parents[2] / "data" / "odd_recipes" / "local_paths.yaml"


@pytest.fixture(autouse=True)
def _shared_temporary_folders() -> None:
    """Here /tmp is what it is."""


def warnings(llmlaunch: CommandLine, *overrides: str) -> list[str]:
    few = "layout={context: 1, micro_batch_size: 1, layers_by_stage: even, techniques: asked}"
    lines = llmlaunch("check", LOCAL, few, *overrides).stderr.splitlines()
    return [line for line in lines if "own disk" in line]


def test_checkpoints_and_indexes_on_a_nodes_own_disk_are_warned_of(llmlaunch: CommandLine) -> None:
    said = warnings(llmlaunch)
    assert len(said) == 2
    assert "training.checkpoint_path: /tmp is usually on each node's own disk, where the 4 nodes" in said[0]
    assert "data.cache_path: /tmp is usually" in said[1]


def test_a_job_of_one_node_may_use_its_own_disk(llmlaunch: CommandLine) -> None:
    assert warnings(llmlaunch, "nodes=1", "training.checkpoint_path=/local/ck") == []


def test_a_mount_from_a_shared_file_system_is_shared(llmlaunch: CommandLine) -> None:
    container = "container={image: /images/nemo.sqsh, mounts: ['/lustre/me:/tmp']}"
    assert warnings(llmlaunch, container) == []


@pytest.mark.parametrize(
    "path",
    [
        *("/tmp", "/var/tmp/x", "/dev/shm/x", "/local/x", "/localscratch/x", "/local_scratch/x", "/scratch-local/me"),
        *("/nvme0/x", "/raid/x", "/mnt/nvme0/x", "/ssd/x", "/run/user/1"),
    ],
)
def test_what_sites_commonly_keep_on_a_node_is_known(path: str) -> None:
    assert OWN_DISK.match(path)


@pytest.mark.parametrize("path", ["/scratch/me", "/lustre/tmp/x", "/local2share/x", "/tmpfs-not/x", "/mnt/x"])
def test_what_is_shared_by_its_name_is_not_doubted(path: str) -> None:
    assert OWN_DISK.match(path) is None
