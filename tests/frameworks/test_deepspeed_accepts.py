"""DeepSpeed's own configuration class and engine checks take every ds_config.json we render, and Hugging Face's
TrainingArguments take it with the words of a script of the Trainer's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judges import DeepSpeedJudge, deepspeed_versions

from llmlaunch.assets import asset
from llmlaunch.documents.nested import leaves
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.config import ds_config
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.recipes import gallery_of
from support.recorded import recorded
from support.soak import share

pytestmark = pytest.mark.frameworks

GPU, CPU = "llama2-7b-deepspeed", "quickstart"
PRECISIONS = {GPU: ("bf16", "fp16", "fp32"), CPU: ("bf16", "fp32")}
SPLITS = (Layout(data=1), Layout(data=2), Layout(data=8), Layout(tensor=2, data=4), Layout(context=4, data=2))
BF16_STATES = "training.optimizer={main_parameters: bf16, first_moment: bf16, second_moment: bf16}"
WAYS = (
    (Layout(data=8, zero_stage=3), "layout={offload_optimizer: 1.0, offload_parameters: true}"),
    (Layout(data=8, zero_stage=2), "layout={offload_optimizer: 1.0}"),
    (Layout(data=8, zero_stage=2), "layout={recompute: full, offload_checkpoints: true}"),
    (Layout(data=8, zero_stage=1), "training.gradient_dtype=fp32"),
    (Layout(data=8, zero_stage=3), "training.gradient_dtype=fp32"),
    *((Layout(data=8, zero_stage=stage), BF16_STATES) for stage in (1, 2, 3)),
)


GALLERY = gallery_of("deepspeed")


def recipe_of(name: str, *overrides: str) -> Recipe:
    return load_recipe(asset("recipes", f"{name}.yaml"), ("training.global_batch_size=16", *overrides))


def rendered() -> Iterator[tuple[str, Recipe, Layout]]:
    for name, precisions in PRECISIONS.items():
        for precision in precisions:
            recipe = recipe_of(name, f"training.precision={precision}")
            for split in SPLITS:
                for stage in range(4):
                    layout = replace(split, micro_batch_size=2, zero_stage=stage)
                    yield f"{name} {precision} {layout.describe()}", recipe, layout
    for layout, way in WAYS:
        yield f"{way} {layout.describe()}", recipe_of(GPU, way), layout


SECTIONS = ("activation_checkpointing", "data_types")  # others refuse what they do not know
BY_NAME = {"optimizer", "scheduler", "sequence_parallel_size"}  # read by deepspeed.initialize


def test_every_rendered_config_is_accepted_and_has_nothing_deepspeed_would_overlook(deepspeed: DeepSpeedJudge) -> None:
    jobs, looked_for = list(rendered()), set[str]()
    for label, recipe, layout in share(jobs, jobs[::9]):
        assert deepspeed.judge(recipe, layout) is None, label
        config = ds_config(recipe, layout)
        assert "auto" not in map(str, dict(leaves(config)).values()), label  # of which it takes its own default
        looked_for |= {*config, *(f"{section}.{key}" for section in SECTIONS for key in config.get(section, ()))}
    assert looked_for <= {*deepspeed.keys_read()} | BY_NAME


def test_a_pipelines_config_is_accepted_by_its_engine(deepspeed: DeepSpeedJudge) -> None:
    own = "backend={name: deepspeed, script: train.py, script_kind: pipeline}"
    layout = Layout(pipeline=2, data=4, micro_batch_size=2, zero_stage=1)
    config = ds_config(recipe_of(GPU, own), layout)
    assert deepspeed(config=config, data=4, pipeline=True) is None
    config["zero_optimization"] = {"stage": 2}
    assert "ZeRO-2" in str(deepspeed(config=config, data=4, pipeline=True))


@pytest.mark.parametrize("name", share(GALLERY, GALLERY[::3]))
def test_the_gallerys_plans_are_accepted(deepspeed: DeepSpeedJudge, name: str) -> None:
    recipe = load_recipe(asset("recipes", f"{name}.yaml"))
    plan = make_plan(setting_of(recipe, DeepSpeed()))
    planned = replace(recipe, techniques=plan.chosen.techniques)
    assert deepspeed.judge(planned, plan.layout) is None


KIND = "backend={name: deepspeed, script: train.py, script_kind: hugging-face}"
LEAST = ("training.minimum_learning_rate=1.0e-5", "training.learning_rate_decay=cosine")
# One process, as the Trainer counts them; `use_cpu` because there is no GPU.
PROGRAM = """
import json, sys
from types import SimpleNamespace
from transformers import HfArgumentParser, TrainingArguments
(taken,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*json.loads(sys.argv[1]), "--use_cpu"])
config = taken.hf_deepspeed_config
config.trainer_config_finalize(taken, SimpleNamespace(config=None), taken.max_steps)
print("TAKEN " + json.dumps({
    "config": config.config,
    "bf16": taken.bf16,
    "warmup": taken.get_warmup_steps(taken.max_steps),
    "checkpointing": taken.gradient_checkpointing,
    "decay": taken.weight_decay,
    "kwargs": taken.lr_scheduler_kwargs,
}))
"""


def taken_by_the_trainer(words: list[str]) -> dict[str, Any]:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(words)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in answer.stdout.splitlines() if line.startswith("TAKEN ")]
    assert lines, answer.stderr[-3000:]
    taken: dict[str, Any] = json.loads(lines[0].removeprefix("TAKEN "))
    return taken


def test_the_trainer_takes_words_and_config(tmp_path: Path, deepspeed: DeepSpeedJudge) -> None:
    """Equal values everywhere: the Trainer compares the file with its own arguments and refuses what differs."""
    saving = ("training.save_interval=5", f"training.checkpoint_path={tmp_path / 'ckpt'}")
    overrides = (KIND, "training.precision=bf16", "training.gradient_clipping=0.5", *LEAST, *saving)
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), overrides)
    layout = Layout(data=1, micro_batch_size=2, zero_stage=3, recompute=RECOMPUTE_FULL)
    result = DeepSpeed().render(replace(recipe, path="mine.yaml"), layout)
    rendered = result.files["ds_config.json"]
    (tmp_path / "ds_config.json").write_bytes(rendered)
    words = [f"{tmp_path}{word.suffix}" if isinstance(word, NodeVariable) else word for word in result.program[1:]]
    question = f"{json.dumps(words)} {rendered.decode()}".replace(str(tmp_path), "FOLDER")
    with recorded("trainer_arguments", deepspeed_versions(), live=()) as record:
        taken = record.answer(question, lambda: taken_by_the_trainer(words))
    taken["config"]["steps_per_print"] = recipe.training.log_interval  # accelerate prints steps itself
    assert taken["config"] == json.loads(rendered)
    assert (taken["bf16"], taken["checkpointing"], taken["decay"]) == (True, True, 0.1)
    assert (taken["warmup"], taken["kwargs"]) == (2, {"min_lr": 1e-5})
    assert deepspeed(config=taken["config"], data=1) is None
