"""What a run directory tells of its layout: the stages of its record, the order of its nodes, one rank by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from run_samples import container_job, deepspeed_cpu, megatron_70b, plan, rank_by_itself, script_of

from llmlaunch.cluster.matrix import BandwidthMatrix
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.flags.layout import written_layout
from llmlaunch.layout import Layout
from llmlaunch.placement.traffic import Sizes, Volumes, traffic
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.provenance import Provenance, gather_provenance
from llmlaunch.rendering.run_directory import run_files
from llmlaunch.rendering.run_json import _checkpoint, _restart, placement_json
from llmlaunch.rendering.scripts import job_script
from llmlaunch.rundir.run_file import RunFile, pipeline_rank_of
from llmlaunch.rundir.schema import sound
from support.recipes import recipe_of
from support.rendered_jobs import shown_words

RECIPE = megatron_70b()[0]
LAYERS = RECIPE.model.num_layers


@pytest.mark.parametrize("split", [(20, 21, 20, 19), (10, 10, 10, 10, 10, 10, 11, 9)])
def test_a_written_layout_is_handed_on_as_one_word(split: tuple[int, ...]) -> None:
    layout = Layout(8, 4, len(split) // 4, data=16, sequence_parallel=1, zero_stage=1, layers_by_stage=split)
    rendered = MegatronLM().render(RECIPE, layout)
    files = run_files(RECIPE, plan(RECIPE, layout), {"recipe": RECIPE.name}, rendered, Provenance(code={}))
    assert written_layout(split) in shown_words(files["command.txt"])


@pytest.mark.parametrize("job", [megatron_70b, container_job, deepspeed_cpu])
def test_readers_get_every_key_that_is_written(job: Callable[[], tuple[Recipe, Plan, Rendered]]) -> None:
    of, planned, rendered = job()
    written = json.loads(run_files(of, planned, {}, rendered, gather_provenance(of))["run.json"])
    assert sound(RunFile, written) == written


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
    for (of, planned, rendered), there in (
        (megatron_70b(), True),
        (container_job(), True),
        (deepspeed_cpu(), False),
    ):
        for placement in ("auto", "slurm"):
            changed = replace(of, placement=placement)
            files = run_files(changed, planned, {}, rendered, gather_provenance(changed))
            assert ("placement.json" in files) == (there and placement == "auto")
            assert json.loads(files["run.json"])["job"]["is_placed"] == (there and placement == "auto")


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


def test_segments_of_racks_hold_whole_groups_of_ranks() -> None:
    rack = {"devices_per_node": 4, "nvlink_domain_devices": 72, "nodes_per_block": 18}
    of = replace(with_cluster(megatron_70b()[0], **rack), nodes=30)
    for tensor, segment in ((4, 15), (8, 10)):
        assert f"#SBATCH --segment={segment}\n" in job_script(of, plan(of, Layout(tensor, data=120 // tensor)))


def test_the_recipe_has_the_last_word_on_switches() -> None:
    of = with_cluster(megatron_70b()[0], nodes_per_switch=32)
    changed = replace(of, slurm={**of.slurm, "switches": "1@12:00:00"})
    assert "#SBATCH --switches=1@12:00:00" in directives(changed)
    assert not [line for line in directives(replace(of, slurm={"switches": False})) if "switches" in line]
    assert not [line for line in directives(replace(of, placement="slurm")) if "switches" in line]


lone = cache(rank_by_itself)


@cache
def files() -> dict[str, bytes]:
    return run_files(lone().recipe, lone().plan, {}, lone().rendered, Provenance(code={}), lone().described)


def lone_directives() -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", files()["job.sbatch"].decode(), re.MULTILINE))


def test_it_asks_for_one_device_on_a_part_of_one_node() -> None:
    options = lone_directives()
    assert (options["nodes"], options["gres"], options["cpus-per-task"]) == ("1", "lscratch:100", "12")
    assert options["gpus-per-node"] == "1"
    assert options["mem"] == f"{2**40 * 9 // 10 // 8 // 2**20}M"
    assert not {"exclusive", "nodelist", "switches", "segment", "requeue", "signal"} & set(options)


def test_it_asks_for_minutes_where_and_as_the_recipe_says() -> None:
    options = lone_directives()
    assert options["time"] == "00:20:00"  # a quarter of an hour to start, and three steps of 10 s
    assert (options["partition"], options["qos"], options["job-name"]) == ("gpu", "long", "llama3-70b-rank3")


def test_it_tries_no_nodes_prepares_nothing_and_does_not_come_back() -> None:
    assert "preflight" not in files()["job.sbatch"].decode()
    assert "prepare" not in files()["job.sbatch"].decode()
    assert not any(name.startswith("fallback/") for name in files())
    assert (lone().described["restart"], lone().described["checkpoint"], lone().described["fallbacks"]) == (
        None,
        None,
        [],
    )


def test_readers_get_every_key_that_is_written_of_a_rank_alone() -> None:
    written = json.loads(files()["run.json"])
    assert written["rehearsal"]["recipe"] == lone().recipe.name.removesuffix("-rank3")
    assert sound(RunFile, written) == written


def test_one_process_is_started_with_the_rank_s_place() -> None:
    launch = json.loads(files()["run.json"])["launch"]
    assert launch["by_itself"]
    assert launch["environment"].items() >= {"RANK": "384", "WORLD_SIZE": "512", "LOCAL_RANK": "0"}.items()
    words = shown_words(files()["command.txt"])
    assert words[:2] == ["$LLMLAUNCH_NODE_FILES/trainer/rank_alone.py", "$MEGATRON_LM_PATH/pretrain_gpt.py"]


def test_torch_s_own_peaks_are_always_written_down() -> None:
    assert "hook/llmlaunch_memory_probe.py" in files()


def test_what_it_measures_is_of_the_job_it_is_of() -> None:
    described = lone().described
    assert (described["nodes"], described["devices_per_node"], described["pipeline"]) == (1, 1, 4)
    assert described["measurement"]["world_size"] == 512  # type: ignore[index]
    assert len(described["predicted_bytes"]) == 4  # type: ignore[arg-type]
    assert described["progress"]["steps"] == 3  # type: ignore[index]
    assert pipeline_rank_of(described, 384) == 3


def test_its_stage_is_the_one_it_was_started_for_whatever_its_number() -> None:
    assert pipeline_rank_of({**lone().described, "rehearsal": {"pipeline_rank": 2}}, 16) == 2


def test_it_says_where_checkpoints_lie_and_what_becomes_of_slow_nodes_where_the_recipe_does() -> None:
    saving = ("training.checkpoint_path=/ckpt", "training.save_interval=100")
    asked = recipe_of("llama3-8b", *saving, "training.non_persistent_save_interval=10", "training.keep_checkpoints=2")
    plain = {"path": "/ckpt", "tracker": "latest_checkpointed_iteration.txt", "promised": True, "interval": 100}
    assert _checkpoint(recipe_of("llama3-8b", *saving)) == plain
    assert _checkpoint(asked) == {**plain, "keep": 2, "non_persistent": "non_persistent"}
    replacing = recipe_of("llama3-8b", *saving, "spare_nodes=1", "restart={slow_nodes: replace}")
    assert (_restart(replacing) or {})["slow_nodes"] == "replace"
    assert "slow_nodes" not in (_restart(asked) or {})
