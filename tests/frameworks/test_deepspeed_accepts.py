"""DeepSpeed's own configuration class and engine checks take every ds_config.json we render, and Hugging Face's
TrainingArguments take it with the words of a script of the Trainer's. What DeepSpeed takes although it is wrong, our
own checks find."""

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
from judges import DeepSpeedJudge

from llmlaunch.assets import asset
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.config import ds_config
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.ds_config_checks import CHECKS, KNOWN_KEYS, wrongly_accepted
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


GALLERY = sorted(
    path.stem
    for path in asset("recipes", "quickstart.yaml").parent.glob("*.yaml")
    if "backend: deepspeed" in path.read_text("utf-8") or "name: deepspeed" in path.read_text("utf-8")
)


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


def test_every_rendered_config_is_accepted_and_has_nothing_deepspeed_would_overlook(deepspeed: DeepSpeedJudge) -> None:
    jobs = list(rendered())
    for label, recipe, layout in share(jobs, jobs[::4]):
        assert deepspeed.judge(recipe, layout) is None, label
        assert wrongly_accepted(ds_config(recipe, layout)) == [], label


def test_a_pipelines_config_is_accepted_by_its_engine(deepspeed: DeepSpeedJudge) -> None:
    own = "backend={name: deepspeed, script: train.py, script_kind: pipeline}"
    layout = Layout(pipeline=2, data=4, micro_batch_size=2, zero_stage=1)
    config = ds_config(recipe_of(GPU, own), layout)
    assert deepspeed(config=config, data=4, pipeline=True) is None
    assert wrongly_accepted(config) == []
    config["zero_optimization"] = {"stage": 2}
    assert "ZeRO-2" in str(deepspeed(config=config, data=4, pipeline=True))


WRONG: dict[str, dict[str, Any]] = {
    "Check batch related parameters": {"train_batch_size": 15},
    "reduce_buckets": {"zero_optimization": {"stage": 0, "reduce_buckets": 1}},
    "Input should be 0, 1, 2, 3": {"zero_optimization": {"stage": 4}},
    "simultaneously enabled": {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
    "Partial offloading": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    "unsupported mix": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "has been removed": {"sparse_attention": {}},
}
PLAIN = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0},
}


@pytest.mark.parametrize("said", WRONG)
def test_the_judge_is_deepspeed_and_refuses(deepspeed: DeepSpeedJudge, said: str) -> None:
    assert deepspeed(config=PLAIN, data=8) is None
    refused = deepspeed(config=PLAIN | WRONG[said], data=8)
    assert refused is not None
    assert said in refused


# What DeepSpeed takes although it is wrong: the key our own check names.
OVERLOOKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown section": ("unknown-key", {"zero_optimisation": {"stage": 3}}, "zero_optimisation"),
    "unknown checkpointing key": (
        "unknown-key",
        {"activation_checkpointing": {"cpu_checkpoints": True}},
        "activation_checkpointing.cpu_checkpoints",
    ),
    "unknown pipeline key": ("unknown-key", {"pipeline": {"stage": 2}}, "pipeline.stage"),
    "auto": ("auto-for-default", {"bf16": {"enabled": "auto"}}, "bf16.enabled"),
    "unknown optimizer": ("optimizer", {"optimizer": {"type": "AdamWW", "params": {}}}, "optimizer.type"),
    "unknown scheduler": ("scheduler", {"scheduler": {"type": "Cosine", "params": {}}}, "scheduler.type"),
    "parameters offloaded at 2": (
        "offload-parameters",
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param",
    ),
    "states offloaded at 0": (
        "offload-optimizer",
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer",
    ),
    "pipeline with ZeRO 2": (
        "pipeline-zero",
        {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}},
        "zero_optimization.stage",
    ),
    "pipeline with AutoTP": (
        "pipeline-tensor",
        {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel.autotp_size",
    ),
    "AutoTP with Ulysses": (
        "tensor-or-context",
        {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}},
        "sequence_parallel_size",
    ),
}


@pytest.mark.parametrize("case", OVERLOOKED)
def test_what_deepspeed_overlooks_our_own_checks_find(deepspeed: DeepSpeedJudge, case: str) -> None:
    check, change, key = OVERLOOKED[case]
    config = PLAIN | change
    assert deepspeed(config=config, data=8) is None
    assert (key, check) in wrongly_accepted(config)


def test_what_the_engine_refuses_later_is_found_in_the_file_already() -> None:
    config = PLAIN | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert wrongly_accepted(config) == [("data_types.grad_accum_dtype", "wide-gradients")]


# Read by name alone in DeepSpeedConfig, or by deepspeed.initialize; and what it looks for to refuse it.
READ_ELSEWHERE = {
    *("aio", "autotuning", "data_parallel_size", "flops_profiler", "optimizer", "scheduler", "sequence_parallel_size"),
}
REMOVED = {
    *("amp", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula"),
    *("progressive_layer_drop", "quantize_training", "sparse_attention"),
}


def test_the_known_keys_are_those_deepspeed_reads(deepspeed: DeepSpeedJudge) -> None:
    read = set(deepspeed.keys_read())
    ours = {f"{section}.{key}".lstrip(".") for section, keys in KNOWN_KEYS.items() for key in keys}
    ours = {key for key in ours if not key.startswith("pipeline.")}  # every key there is handed on
    assert read - ours <= REMOVED
    assert ours - read <= READ_ELSEWHERE


@pytest.mark.parametrize("name", GALLERY)
def test_the_gallerys_plans_are_accepted(deepspeed: DeepSpeedJudge, name: str) -> None:
    recipe = load_recipe(asset("recipes", f"{name}.yaml"))
    plan = make_plan(setting_of(recipe, DeepSpeed()))
    planned = replace(recipe, techniques=plan.chosen.techniques)
    assert deepspeed.judge(planned, plan.layout) is None
    assert wrongly_accepted(ds_config(planned, plan.layout)) == []


def test_every_check_has_its_case() -> None:
    assert CHECKS.keys() == {check for check, _, _ in OVERLOOKED.values()} | {"wide-gradients"}


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
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(words)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in answer.stdout.splitlines() if line.startswith("TAKEN ")]
    assert lines, answer.stderr[-3000:]
    taken = json.loads(lines[0].removeprefix("TAKEN "))
    taken["config"]["steps_per_print"] = recipe.training.log_interval  # accelerate prints steps itself
    assert taken["config"] == json.loads(rendered)
    assert (taken["bf16"], taken["checkpointing"], taken["decay"]) == (True, True, 0.1)
    assert (taken["warmup"], taken["kwargs"]) == (2, {"min_lr": 1e-5})
    assert deepspeed(config=taken["config"], data=1) is None
