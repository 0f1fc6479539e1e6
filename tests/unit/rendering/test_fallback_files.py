"""fallback/K/ holds what its layout needs of its own, names it there, and shares the rest."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.assets import asset
from llmlaunch.planner.plan import Fallback
from llmlaunch.rendering.provenance import Provenance
from llmlaunch.rendering.restarts import warning_seconds
from llmlaunch.rendering.run_directory import render_run, run_files
from support.rendered_jobs import shown_words

FEW = "context: 1, recompute: none, offload_optimizer: 0, layers_by_stage: even, techniques: asked"
FEWER_LAYOUTS = {
    "llama2-7b-deepspeed": f"layout={{zero_stage: [2, 3], {FEW}}}",
    "llama3-8b": f"layout={{pipeline: 1, micro_batch_size: 1, offload_modules: [], offload_layers: 0, {FEW}}}",
}


def plan_of(name: str, *words: str) -> PlannedRun:
    return plan(asset("recipes", f"{name}.yaml"), (FEWER_LAYOUTS[name], *words))


def files_of(run: PlannedRun) -> dict[str, bytes]:
    rendered = run.backend.render(run.recipe, run.plan.layout)
    return run_files(run.recipe, run.plan, run.json, rendered, Provenance(code={}))


def described(files: dict[str, bytes], folder: str = "") -> dict[str, Any]:
    value: dict[str, Any] = json.loads(files[f"{folder}run.json"])
    return value


@pytest.fixture(scope="module")
def deepspeed() -> tuple[PlannedRun, dict[str, bytes]]:
    run = plan_of("llama2-7b-deepspeed", "on_oom=fallback")
    return run, files_of(run)


def test_a_fallback_has_its_own_files_and_shares_the_trainer(deepspeed: tuple[PlannedRun, dict[str, bytes]]) -> None:
    run, files = deepspeed
    own = sorted(name.removeprefix("fallback/1/") for name in files if name.startswith("fallback/1/"))
    assert own == ["arguments.json", "command.txt", "ds_config.json", "placement.json", "plan.json", "run.json"]
    assert run.plan.fallbacks is not None
    for number, fallback in enumerate(run.plan.fallbacks.layouts, start=1):
        config = json.loads(files[f"fallback/{number}/ds_config.json"])
        assert config["train_micro_batch_size_per_gpu"] == fallback.plan.layout.micro_batch_size
        assert config["zero_optimization"]["stage"] == fallback.plan.layout.zero_stage
        words = shown_words(files[f"fallback/{number}/command.txt"])
        at = words.index("--deepspeed_config")
        assert words[at + 1] == f"$LLMLAUNCH_RUN_DIR/fallback/{number}/ds_config.json"
        assert words[0].startswith("$LLMLAUNCH_NODE_FILES/trainer/")


def test_run_json_has_the_chain_and_each_layout_its_own_prediction(
    deepspeed: tuple[PlannedRun, dict[str, bytes]],
) -> None:
    run, files = deepspeed
    assert run.plan.fallbacks is not None
    chain = [
        {"layout": "fallback/1", "keeps_checkpoints": False, "loads": []},
        {"layout": "fallback/2", "keeps_checkpoints": False, "loads": [""]},  # the planned ZeRO stage again
    ]
    for number, fallback in enumerate(run.plan.fallbacks.layouts, start=1):
        described_run = described(files, f"fallback/{number}/")
        assert described_run["fallbacks"] == described(files)["fallbacks"] == chain
        assert described_run["predicted_bytes"] == [rank.device_bytes for rank in fallback.plan.estimate.ranks]
        assert described_run["measurement"]["micro_batch_size"] == fallback.plan.layout.micro_batch_size
        assert described_run["recipe_digest"] == described(files)["recipe_digest"]
        plan = json.loads(files[f"fallback/{number}/plan.json"])
        assert plan["layout"] == fallback.plan.layout.as_json()
    assert described(files)["after_checkpoint"] == "reshard"


def test_what_cannot_load_begins_again_in_a_folder_of_its_own() -> None:
    saving = ("training.checkpoint_path=/ckpt", "training.save_interval=10")
    again = files_of(plan_of("llama2-7b-deepspeed", *saving, "on_oom={layouts: 2, after_checkpoint: restart}"))
    assert [entry["loads"] for entry in described(again)["fallbacks"]] == [[], [""]]
    places = [described(again, folder)["checkpoint"]["path"] for folder in ("", "fallback/1/", "fallback/2/")]
    assert places == ["/ckpt", "/ckpt-fallback-1", "/ckpt"]
    saved = [shown_words(again[f"fallback/{number}/command.txt"]) for number in (1, 2)]
    assert [words[words.index("--save") + 1] for words in saved] == ["/ckpt-fallback-1", "/ckpt"]
    stays = files_of(plan_of("llama2-7b-deepspeed", "on_oom=fallback", *saving))
    assert described(stays, "fallback/1/")["checkpoint"]["path"] == "/ckpt"


def test_the_job_is_told_in_time_for_the_slowest_of_its_layouts() -> None:
    saving = ("training.checkpoint_path=/ckpt", "training.save_interval=10")
    run = plan_of("llama2-7b-deepspeed", "on_oom=fallback", *saving)
    assert run.plan.fallbacks is not None
    slowest = run.plan.fallbacks.layouts[-1].plan
    slow = replace(slowest, chosen=replace(slowest.chosen, step_seconds=900.0))
    chain = replace(run.plan.fallbacks, layouts=(Fallback(slow, (False,)),))
    alone, with_slow = (warning_seconds(run.recipe, replace(run.plan, fallbacks=f)) for f in (None, chain))
    assert alone is not None
    assert with_slow is not None
    assert with_slow > 900 > alone


def test_megatron_gets_other_arguments_and_no_other_files() -> None:
    run = plan_of("llama3-8b", "on_oom=fallback")
    files = files_of(run)
    own = sorted(name.removeprefix("fallback/1/") for name in files if name.startswith("fallback/1/"))
    assert own == ["arguments.json", "command.txt", "placement.json", "plan.json", "run.json"]
    assert run.plan.fallbacks is not None
    tensor = run.plan.fallbacks.layouts[0].plan.layout.tensor
    words = shown_words(files["fallback/1/command.txt"])
    assert words[words.index("--tensor-model-parallel-size") + 1] == str(tensor)


def test_the_folders_are_their_owners_alone(deepspeed: tuple[PlannedRun, dict[str, bytes]], tmp_path: Path) -> None:
    run, files = deepspeed
    rendered = run.backend.render(run.recipe, run.plan.layout)
    render_run(run.recipe, run.plan, run.json, rendered, tmp_path / "run")
    for path in (tmp_path / "run" / "fallback").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "run" / "fallback" / "2" / "command.txt").read_bytes() == files["fallback/2/command.txt"]
    assert stat.S_IMODE((tmp_path / "run" / "fallback").stat().st_mode) == 0o700


FEWER = ("training.checkpoint_path=/ckpt", "training.save_interval=10", "nodes={count: 4, at_least: 1}")


def test_a_layout_for_fewer_nodes_lies_in_a_folder_of_their_number() -> None:
    run = plan_of("llama2-7b-deepspeed", *FEWER)
    files = files_of(run)
    assert run.plan.fewer_nodes is not None
    folders = [f"nodes/{nodes}/" for nodes, _ in run.plan.fewer_nodes.plans]
    assert folders == ["nodes/2/", "nodes/1/"]
    for folder, (nodes, fewer) in zip(folders, run.plan.fewer_nodes.plans, strict=True):
        own = described(files, folder)
        assert (own["nodes"], own["measurement"]["world_size"]) == (nodes, fewer.layout.world_size)
        assert own["predicted_bytes"] == [rank.device_bytes for rank in fewer.estimate.ranks]
        assert own["checkpoint"] == described(files)["checkpoint"]
        assert "fewer_nodes" not in own
        config = json.loads(files[f"{folder}ds_config.json"])
        assert config["train_batch_size"] == json.loads(files["ds_config.json"])["train_batch_size"]
        assert (f"{folder}placement.json" in files) == (nodes > 1)
    fewer_nodes = described(files)["fewer_nodes"]
    assert [layout["layout"] + "/" for layout in fewer_nodes["layouts"]] == folders
    assert fewer_nodes["step_seconds"] == run.plan.chosen.step_seconds < fewer_nodes["layouts"][0]["step_seconds"]


def test_a_megatron_checkpoint_is_saved_to_be_loaded_on_fewer_nodes() -> None:
    run = plan_of("llama3-8b", *FEWER)
    files = files_of(run)
    for folder in ("", "nodes/2/", "nodes/1/"):
        assert "--dist-ckpt-optim-fully-reshardable" in shown_words(files[f"{folder}command.txt"])
    assert not [name for name in files_of(plan_of("llama3-8b", *FEWER[:2])) if name.startswith("nodes/")]
