"""One run of Weights & Biases for a whole run directory, with the prediction as its configuration; and the flags by
which each framework is told of W&B and TensorBoard."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_samples import deepspeed_cpu, outside_slurm, recipe, tracked_job

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, core_parser
from llmlaunch.layout import Layout
from llmlaunch.node.node_environment import export_tracking
from llmlaunch.recipe.sections import Tracking, WandbRun
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.run_directory import render_run
from llmlaunch.rendering.scripts import paths_to_mount
from support.recipes import recipe_of, small
from support.wandb_files import read_back

WANDB = "tracking={wandb: {project: ours, entity: team, mode: offline}, tensorboard: /tb}"
ALONE = "tracking={wandb: {project: ours}}"

# As Megatron-LM and DeepSpeed do, without an id.
TRAINER = """\
import wandb
for attempt in range(2):
    run = wandb.init(project="ours", config={"learning_rate": 0.1})
    run.log({"loss": 1.0})
    run.finish()
"""


def attempts(run: Path) -> list[dict[str, object]]:
    """Train twice with what a node exports of W&B; return what wandb wrote each time."""
    environment = outside_slurm("WANDB")
    export_tracking(json.loads((run / "run.json").read_bytes())["launch"], run, run, environment, lambda task: task())
    environment |= {"WANDB_MODE": "offline"}
    command = [sys.executable, "-c", TRAINER]
    process = subprocess.run(
        command, cwd=run, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return [read_back(written) for written in run.glob("wandb/offline-run-*")]


def test_every_attempt_goes_on_with_one_run_that_has_the_prediction_as_configuration(tmp_path: Path) -> None:
    of, planned, rendered = deepspeed_cpu()
    run = tmp_path / "run"
    render_run(
        replace(of, tracking=Tracking(WandbRun("ours", mode="offline"))),
        planned,
        {"recipe": of.name},
        replace(rendered, environment={}),
        run,
    )
    (run / "run.id").write_text("ti.ny-20260101T000000Z-0001\n")
    written = attempts(run)
    assert len(written) == 2
    for contents in written:
        assert (contents["id"], contents["project"]) == ("ti-ny-20260101T000000Z-0001", "ours")
        assert contents["name"] == "ti.ny-20260101T000000Z-0001"
        config = contents["config"]
        assert isinstance(config, dict)
        assert config["learning_rate"] == 0.1
        predicted = config["llmlaunch"]
        assert predicted["predicted_bytes"]["resident"]["stage0"] == planned.estimate.ranks[0].device_bytes
        assert predicted["layout"]["data"] == 2
        assert (predicted["predicted_step_seconds"], predicted["limit_bytes"]) == (10.0, planned.limit.limit_bytes)


def words(rendered: Rendered) -> list[str]:
    return [f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word for word in rendered.program]


def megatron(*overrides: str) -> list[str]:
    return words(MegatronLM().render(small(*overrides), Layout(data=32, zero_stage=1)))


def value(program: list[str], flag: str) -> str:
    return program[program.index(flag) + 1]


def test_megatron_is_told_of_both_and_gets_a_folder_without_which_it_logs_nothing_to_wandb() -> None:
    both, alone, none = megatron(WANDB), megatron(ALONE), megatron()
    assert (value(both, "--wandb-project"), value(both, "--wandb-entity")) == ("ours", "team")
    assert (value(both, "--wandb-exp-name"), value(both, "--wandb-save-dir")) == ("$WANDB_NAME", "$LLMLAUNCH_RUN_DIR")
    assert value(both, "--tensorboard-dir") == "/tb"
    assert value(alone, "--tensorboard-dir") == "$LLMLAUNCH_RUN_DIR/tensorboard"
    added = [word for word in both if word.startswith("--") and word not in none]
    assert all(word in core_parser(version).flags for version in KNOWN_VERSIONS for word in added)
    assert value(megatron("training.tensorboard=/old"), "--tensorboard-dir") == "/old"


def deepspeed(kind: str, *overrides: str) -> tuple[list[str], dict[str, object]]:
    own = () if kind == "shipped" else (f"backend={{name: deepspeed, script: /me/train.py, script_kind: {kind}}}",)
    rendered = DeepSpeed().render(recipe_of("llama2-7b-deepspeed", *own, *overrides), Layout(data=16, zero_stage=1))
    return words(rendered), json.loads(rendered.files["ds_config.json"])


@pytest.mark.parametrize("kind", ["shipped", "own"])
def test_deepspeeds_engine_is_told_in_its_configuration(kind: str) -> None:
    program, config = deepspeed(kind, WANDB)
    group = "llama2-7b-deepspeed"
    assert config["wandb"] == {"enabled": True, "project": "ours", "team": "team", "group": group}
    assert config["tensorboard"] == {"enabled": True, "output_path": "/tb", "job_name": group}
    assert "--report_to" not in program
    assert not {"wandb", "tensorboard"} & set(deepspeed(kind)[1])


def test_hugging_faces_trainer_is_told_by_its_arguments_and_the_engine_is_not() -> None:
    program, config = deepspeed("hugging-face", WANDB)
    at = program.index("--report_to")
    assert program[at : at + 5] == ["--report_to", "wandb", "tensorboard", "--run_name", "$WANDB_NAME"]
    assert not {"wandb", "tensorboard"} & set(config)
    assert "--report_to" not in deepspeed("hugging-face")[0]


def test_folders_that_are_written_are_mounted_into_a_container() -> None:
    of = replace(tracked_job()[0], container=recipe_with_container().container)
    assert {"/runs", "/tb"} <= set(paths_to_mount(of))


def recipe_with_container() -> Recipe:
    from llmlaunch.recipe.containers import Container

    return recipe(container=Container("/images/box.sif", (), "apptainer"))


def test_two_folders_for_tensorboard_and_a_key_in_the_recipe_are_refused() -> None:
    with pytest.raises(UserError, match=r"training\.tensorboard.*remove one of the two"):
        small(WANDB, "training.tensorboard=/old")
    with pytest.raises(UserError, match=r"training\.tensorboard.*write tracking\.tensorboard"):
        recipe_of("llama2-7b-deepspeed", "training.tensorboard=/old")
    with pytest.raises(UserError, match=r"environment\.WANDB_API_KEY|WANDB_API_KEY"):
        small(WANDB, "environment={WANDB_API_KEY: 0123456789abcdef0123456789abcdef01234567}")
    with pytest.raises(UserError, match=r"tracking\.wandb\.project"):
        small("tracking={wandb: {project: a/b}}")
