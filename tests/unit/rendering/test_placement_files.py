"""What a run directory holds for choosing the order of the nodes, and what the job asks SLURM for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from run_samples import container_job, deepspeed_cpu, megatron_70b, script_of

from llmlaunch.cluster.matrix import BandwidthMatrix
from llmlaunch.placement.traffic import Sizes, Volumes, traffic
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.provenance import gather_provenance
from llmlaunch.rendering.run_directory import run_files
from llmlaunch.rendering.run_json import placement_json


def directives(of: Recipe) -> list[str]:
    return [line for line in script_of(of).splitlines() if line.startswith("#SBATCH")]


def with_cluster(of: Recipe, **changes: object) -> Recipe:
    return replace(of, cluster=replace(of.cluster, **changes))  # type: ignore[arg-type]


def test_the_file_says_what_the_job_sends_between_its_nodes() -> None:
    of, plan, _ = megatron_70b()
    matrix = BandwidthMatrix(("a", "b"), ((0.0, 17.25e9), (18e9, 0.0)))
    job = json.loads(placement_json(with_cluster(of, bandwidth=matrix), plan.layout))
    assert job["matrix"] == {"nodes": ["a", "b"], "gigabytes_per_second": [[0.0, 17.25], [18.0, 0.0]]}
    volumes = Volumes(**{**job["bytes"], "data": tuple(job["bytes"]["data"])})
    terms = traffic(Sizes(**job["layout"]), volumes, job["devices_per_node"])
    # 64 nodes: 4 stages of 16, tensor parallel inside each node
    assert len(terms["pipeline"]) == 16
    assert len(terms["data"]) == 64


def test_only_jobs_of_several_nodes_that_leave_the_order_open_have_it() -> None:
    for (of, plan, rendered), there in (
        (megatron_70b(), True),
        (container_job(), True),
        (deepspeed_cpu(), False),
    ):
        for placement in ("auto", "slurm"):
            changed = replace(of, placement=placement)
            files = run_files(changed, plan, {}, rendered, gather_provenance(changed))
            assert ("placement.json" in files) == (there and placement == "auto")
            assert (b"node.pyz place" in files["job.sbatch"]) == (there and placement == "auto")


@pytest.mark.parametrize(
    ("nodes", "cluster", "wanted"),
    [
        (64, {}, []),
        (64, {"nodes_per_switch": 32}, ["#SBATCH --switches=2"]),
        (20, {"nodes_per_switch": 32}, ["#SBATCH --switches=1"]),
        (1, {"nodes_per_switch": 32, "nodes_per_block": 18}, []),
        (64, {"nodes_per_block": 18}, ["#SBATCH --segment=16"]),
        (36, {"nodes_per_block": 18}, ["#SBATCH --segment=18"]),
        (12, {"nodes_per_block": 18}, ["#SBATCH --segment=12"]),
        (37, {"nodes_per_block": 18}, []),
    ],
)
def test_the_job_asks_for_near_nodes_where_the_profile_says_slurm_knows_them(
    nodes: int, cluster: dict[str, int], wanted: list[str]
) -> None:
    of = replace(with_cluster(megatron_70b()[0], **cluster), nodes=nodes)
    near = [line for line in directives(of) if "switches" in line or "segment" in line]
    assert near == wanted


def test_the_recipe_has_the_last_word_on_switches() -> None:
    of = with_cluster(megatron_70b()[0], nodes_per_switch=32)
    changed = replace(of, slurm={**of.slurm, "switches": "1@12:00:00"})
    assert "#SBATCH --switches=1@12:00:00" in directives(changed)
    assert not [line for line in directives(replace(of, slurm={"switches": False})) if "switches" in line]
    assert not [line for line in directives(replace(of, placement="slurm")) if "switches" in line]
