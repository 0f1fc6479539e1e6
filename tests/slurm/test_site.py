"""A real site describes itself, and each way to ask for its GPUs gives every node's step all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_machine import Cluster
from person import Person

from llmlaunch.cluster.load import load_cluster
from llmlaunch.recipe.load import load_recipe
from llmlaunch.rendering.scripts import sbatch_options
from llmlaunch.rendering.shell import directive

pytestmark = pytest.mark.slurm

RECIPE = """\
schema: 1
name: asks
model: llama3-8b
backend: megatron-lm
cluster: {base: h100-80gb-x8, cpus_per_node: 2, slurm: {exclusive: false}, %s}
nodes: 2
training: {sequence_length: 8192, global_batch_size: 512, steps: 10}
data: {mock: true}
"""
# What each node's task sees, as job.sbatch starts it.
STEP = """
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --export=ALL \\
  --output=seen.%n bash -c 'printf "%s %s" "${CUDA_VISIBLE_DEVICES:-none}" "$(nproc)"'
"""
FORMS = ("gpus-per-node", "gres", "gpus-per-task")


def test_the_profile_a_cluster_drafts_of_itself_is_that_cluster(person: Person) -> None:
    person.llmlaunch("init", "--site", "ours", code=0)
    cluster = load_cluster("./ours.yaml", person.home)
    assert (cluster.accelerator.name, cluster.devices_per_node, cluster.cpus_per_node) == ("h100-80gb", 8, 4)
    assert cluster.host_memory_bytes == 62 * 2**30
    assert (cluster.slurm["partition"], cluster.gpu_request) == ("train", "gpus-per-node")
    assert "ours.yaml exists" in person.llmlaunch("init", "--site", "ours", code=2).stderr


@pytest.mark.parametrize(
    "asked",
    [
        *("gpu_request: " + form + kind for form in FORMS for kind in ("", ", gpu_type: h100")),
        "gpu_request: none",
    ],
)
def test_every_form_of_asking_gives_each_node_all_its_gpus(asked: str, slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE % asked, encoding="utf-8")
    options = sbatch_options(load_recipe(tmp_path / "recipe.yaml"), None)
    lines = [line for line in (directive(*option) for option in options.items()) if line]
    (tmp_path / "job").write_text("\n".join(["#!/bin/bash", *lines]) + STEP, encoding="utf-8")
    assert slurm.run(tmp_path, "job") == "0:0"
    seen = "none" if asked.endswith("none") else "0,1,2,3,4,5,6,7"
    assert [(tmp_path / f"seen.{node}").read_text().split()[0] for node in (0, 1)] == [seen, seen]
