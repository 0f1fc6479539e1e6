"""DeepSpeed's own configuration class and engine checks take every ds_config.json we render; and what it takes although
it is wrong, our own checks find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from judges import DeepSpeedJudge

from llmlaunch.assets import asset
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.backends.deepspeed.config import ds_config, model_config
from llmlaunch.backends.deepspeed.scripts import pipeline_config
from llmlaunch.layout import Layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.ds_config_checks import CHECKS, KNOWN_KEYS, wrongly_accepted

pytestmark = pytest.mark.frameworks

GPU, CPU = "llama2-7b-deepspeed", "quickstart"
PRECISIONS = {GPU: ("bf16", "fp16", "fp32"), CPU: ("bf16", "fp32")}
SPLITS = (Layout(data=1), Layout(data=2), Layout(data=8), Layout(tensor=2, data=4), Layout(context=4, data=2))
WAYS = (
    (Layout(data=8, zero_stage=3), "layout={offload_optimizer: 1.0, offload_parameters: true}"),
    (Layout(data=8, zero_stage=2), "layout={offload_optimizer: 1.0}"),
    (Layout(data=8, zero_stage=2), "layout={recompute: full, offload_checkpoints: true}"),
    (Layout(data=8, zero_stage=1), "training.gradient_dtype=fp32"),
    (Layout(data=8, zero_stage=3), "training.gradient_dtype=fp32"),
)


GALLERY = sorted(
    path.stem
    for path in asset("recipes", "quickstart.yaml").parent.glob("*.yaml")
    if "backend: deepspeed" in path.read_text("utf-8") or "name: deepspeed" in path.read_text("utf-8")
)


def recipe_of(name: str, *overrides: str) -> Recipe:
    return load_recipe(asset("recipes", f"{name}.yaml"), ("training.global_batch_size=16", *overrides))


def question(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    return {
        "config": ds_config(recipe, layout),
        "data": layout.data,
        "total": recipe.workload.global_batch_size,
        "gpu": recipe.cluster.accelerator.kind == "gpu",
        "model": model_config(recipe),
        "sequence": recipe.workload.sequence_length,
    }


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
    for label, recipe, layout in rendered():
        case = question(recipe, layout)
        assert deepspeed(**case) is None, label
        assert wrongly_accepted(case["config"]) == [], label


def test_a_pipelines_config_is_accepted_by_its_engine(deepspeed: DeepSpeedJudge) -> None:
    own = "backend={name: deepspeed, script: train.py, script_kind: pipeline}"
    layout = Layout(pipeline=2, data=4, micro_batch_size=2, zero_stage=1)
    config = pipeline_config(recipe_of(GPU, own), layout)
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
    assert (key, check) in [(found, by.key) for found, by in wrongly_accepted(config)]


def test_what_the_engine_refuses_later_is_found_in_the_file_already() -> None:
    config = PLAIN | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert [(key, check.key) for key, check in wrongly_accepted(config)] == [
        ("data_types.grad_accum_dtype", "wide-gradients")
    ]


# Read by name alone in DeepSpeedConfig, or by deepspeed.initialize; and what it looks for to refuse it.
READ_ELSEWHERE = {
    "aio",
    "autotuning",
    "data_parallel_size",
    "flops_profiler",
    "optimizer",
    "scheduler",
    "sequence_parallel_size",
}
REMOVED = {
    "amp",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
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
    case = question(planned, plan.layout)
    assert deepspeed(**case) is None
    assert wrongly_accepted(case["config"]) == []


def test_every_check_has_its_case() -> None:
    assert {check.key for check in CHECKS} == {check for check, _, _ in OVERLOOKED.values()} | {"wide-gradients"}
