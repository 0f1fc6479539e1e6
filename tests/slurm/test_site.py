"""A real site describes itself."""

from __future__ import annotations

import pytest
from person import Person

from llmlaunch.cluster.load import load_cluster

pytestmark = pytest.mark.slurm


def test_the_profile_a_cluster_drafts_of_itself_is_that_cluster(person: Person) -> None:
    person.llmlaunch("init", "--site", "ours", code=0)
    cluster = load_cluster("./ours.yaml", person.home)
    assert (cluster.accelerator.name, cluster.devices_per_node, cluster.cpus_per_node) == ("h100-80gb", 8, 4)
    assert cluster.host_memory_bytes == 62 * 2**30
    assert (cluster.slurm["partition"], cluster.gpu_request) == ("train", "gpus-per-node")
    assert "ours.yaml exists" in person.llmlaunch("init", "--site", "ours", code=2).stderr
