"""What is rendered for DeepSpeed says what the plan says, leaves nothing to chance, and refuses what cannot run."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmlaunch.backends.argument import NodeVariable
from llmlaunch.backends.base import Rendered
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.backends.deepspeed.rules import RULES
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout, LayoutColumns, Situation
from llmlaunch.recipe.types import Recipe
from llmlaunch.trainers import TRAINER, TRAINER_MODULES
from support.recipes import recipe_of

GPU_RECIPE, CPU_RECIPE = "llama2-7b-deepspeed", "quickstart"
GPU_LAYOUT = Layout(data=16, micro_batch_size=2, zero_stage=3)
CPU_LAYOUT = Layout(data=2, micro_batch_size=2, zero_stage=1)


def rendered(layout: Layout, name: str = GPU_RECIPE, *overrides: str) -> Rendered:
    return DeepSpeed().render(recipe_of(name, *overrides), layout)


def config(layout: Layout, name: str = GPU_RECIPE, *overrides: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(rendered(layout, name, *overrides).files["ds_config.json"])
    return loaded


def words(result: Rendered) -> list[str]:
    return [f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word for word in result.program]


@pytest.mark.parametrize("layout", [GPU_LAYOUT, replace(GPU_LAYOUT, micro_batch_size=1), replace(GPU_LAYOUT, data=8)])
def test_the_batch_triple_is_exact(layout: Layout) -> None:
    said = config(layout)
    assert said["train_batch_size"] == 256
    assert said["train_micro_batch_size_per_gpu"] == layout.micro_batch_size
    product = said["train_micro_batch_size_per_gpu"] * said["gradient_accumulation_steps"] * layout.data
    assert said["train_batch_size"] == product


@pytest.mark.parametrize(("precision", "section"), [("bf16", {"bf16"}), ("fp16", {"fp16"}), ("fp32", set())])
def test_one_precision_and_no_other(precision: str, section: set[str]) -> None:
    said = config(GPU_LAYOUT, GPU_RECIPE, f"training.precision={precision}")
    assert {"bf16", "fp16"} & set(said) == section


def test_no_optimizer_is_named_so_that_none_is_compiled_on_the_node() -> None:
    said = config(GPU_LAYOUT)
    assert "optimizer" not in said
    assert said["zero_allow_untested_optimizer"] is True


def test_nothing_is_left_to_auto() -> None:
    assert b"auto" not in rendered(GPU_LAYOUT).files["ds_config.json"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_are_never_larger_than_the_model_and_the_estimate_counts_them(stage: int) -> None:
    small = config(replace(CPU_LAYOUT, zero_stage=stage), CPU_RECIPE)["zero_optimization"]
    assert small["stage"] == stage
    assert 1_000_000 <= small["reduce_bucket_size"] <= 8_600_000
    facts = DeepSpeed().facts(recipe_of(CPU_RECIPE))
    assert facts.bucket_bytes >= small["reduce_bucket_size"] * facts.parameter_bytes


def test_gradients_of_bf16_may_accumulate_in_fp32() -> None:
    wide = "training.gradient_dtype=fp32"
    assert config(GPU_LAYOUT, GPU_RECIPE, wide)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in config(GPU_LAYOUT)
    facts = DeepSpeed().facts(recipe_of(GPU_RECIPE, wide))
    assert facts.gradient_life is not None
    assert facts.gradient_life.lasting_sharded[3] == 4.0  # ZeRO 3, bytes per parameter
    assert "gradients-fp32-zero" in {rule.key for rule in DeepSpeed().rules(recipe_of(GPU_RECIPE, wide))}
    with pytest.raises(UserError, match=r"gradient_dtype: gradients accumulate"):
        DeepSpeed().rules(recipe_of(GPU_RECIPE, "training.precision=fp16", wide))


def test_stage_0_says_nothing_of_partitions() -> None:
    assert config(replace(GPU_LAYOUT, zero_stage=0))["zero_optimization"] == {"stage": 0}


def test_the_same_inputs_give_the_same_bytes() -> None:
    assert rendered(GPU_LAYOUT) == rendered(GPU_LAYOUT)


def test_the_script_is_started_from_the_run_directory_with_the_plan() -> None:
    said = words(rendered(replace(CPU_LAYOUT, recompute=RECOMPUTE_FULL), CPU_RECIPE))
    assert said[0] == "$LLMLAUNCH_RUN_DIR/trainer/train.py"
    assert said[said.index("--data") + 1] == "python-source"
    assert said[said.index("--steps") + 1] == "40"
    assert said[said.index("--sequence-length") + 1] == "128"
    assert "--gradient-checkpointing" in said
    assert said[-3:] == ["--deepspeed", "--deepspeed_config", "$LLMLAUNCH_RUN_DIR/ds_config.json"]
    assert "--gradient-checkpointing" not in words(rendered(CPU_LAYOUT, CPU_RECIPE))


def test_the_trainer_travels_with_the_run_and_knows_every_word_it_is_given() -> None:
    result = rendered(CPU_LAYOUT, CPU_RECIPE, "training.save_interval=10", "training.checkpoint_path=/ckpt")
    source = result.files["trainer/train.py"]
    assert source == TRAINER.read_bytes()
    shipped = {f"trainer/{path.name}": path.read_bytes() for path in TRAINER_MODULES}
    assert {name: content for name, content in result.files.items() if name.endswith(".py")} == shipped
    flags = [word for word in words(result) if word.startswith("--")]
    script = b"".join(shipped.values())
    assert all(f'"{flag}"'.encode() in script for flag in flags), flags


def test_the_trainer_imports_nothing_of_llmlaunch_and_runs_on_python_3_9() -> None:
    trees = [ast.parse(path.read_text("utf-8"), feature_version=(3, 9)) for path in TRAINER_MODULES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names} - {path.stem for path in TRAINER_MODULES}
    assert roots - set(sys.stdlib_module_names) == {
        "torch",
        "deepspeed",
        "transformers",
        "peft",
        "safetensors",
        "numpy",
    }


def test_checkpoints_are_written_only_where_asked() -> None:
    asked = ("training.save_interval=10", "training.checkpoint_path=/ckpt")
    said = words(rendered(CPU_LAYOUT, CPU_RECIPE, *asked))
    assert (said[said.index("--save") + 1], said[said.index("--save-interval") + 1]) == ("/ckpt", "10")
    assert "--save" not in words(rendered(CPU_LAYOUT, CPU_RECIPE))


def test_weights_to_start_from_go_to_the_script() -> None:
    said = words(rendered(CPU_LAYOUT, CPU_RECIPE, "training.start_from=/weights/llama"))
    assert said[said.index("--weights") + 1] == "/weights/llama"


def test_a_script_of_ones_own_gets_the_config_and_nothing_else() -> None:
    own = "backend={name: deepspeed, script: /home/me/train.py, script_args: [--epochs, '3']}"
    result = rendered(GPU_LAYOUT, GPU_RECIPE, own, "model=gpt3-175b", "training.sequence_length=2048")
    assert words(result) == [
        "/home/me/train.py",
        "--epochs",
        "3",
        "--deepspeed",
        "--deepspeed_config",
        "$LLMLAUNCH_RUN_DIR/ds_config.json",
    ]
    assert set(result.files) == {"ds_config.json"}


def test_extra_arguments_pass_through_unless_they_are_planned() -> None:
    passed = rendered(GPU_LAYOUT, GPU_RECIPE, "backend={name: deepspeed, extra_args: [--mine, '1']}")
    assert words(passed)[-2:] == ["--mine", "1"]
    with pytest.raises(UserError, match="--seed is planned"):
        rendered(GPU_LAYOUT, GPU_RECIPE, "backend={name: deepspeed, extra_args: [--seed=7]}")


def test_on_a_cpu_the_environment_makes_resident_memory_faithful() -> None:
    environment = rendered(CPU_LAYOUT, CPU_RECIPE).environment
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert int(environment["MALLOC_MMAP_THRESHOLD_"]) <= 131072
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert rendered(GPU_LAYOUT).environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_the_recipes_environment_wins_unless_it_contradicts() -> None:
    threads = rendered(CPU_LAYOUT, CPU_RECIPE, "environment.OMP_NUM_THREADS='4'")
    assert threads.environment["OMP_NUM_THREADS"] == "4"
    with pytest.raises(UserError, match=r"environment\.DS_ACCELERATOR: is 'cuda'.*'cpu'"):
        rendered(CPU_LAYOUT, CPU_RECIPE, "environment.DS_ACCELERATOR=cuda")


def test_on_a_cpu_nothing_of_a_gpu_is_counted() -> None:
    facts = DeepSpeed().facts(recipe_of(CPU_RECIPE))
    assert (facts.workspace_bytes, facts.communicator_bytes) == (0.0, 0.0)
    assert facts.context_bytes > 300e6  # the idle trainer


def refused_by(recipe: Recipe, layout: Layout) -> list[str]:
    situation = Situation(LayoutColumns.of([layout]), recipe.model, recipe.workload, recipe.cluster, recipe.nodes)
    return [rule.key for rule in RULES if not bool(np.all(rule.allows(situation)))]


@pytest.mark.parametrize(
    ("key", "layout"),
    [
        ("pipeline", Layout(pipeline=2, data=8)),
        ("virtual-pipeline", Layout(virtual_pipeline=2, data=16)),
        ("expert", Layout(expert=2, data=16)),
        ("expert-tensor", Layout(expert_tensor=2, data=16)),
        ("sequence-parallel", Layout(sequence_parallel=1, data=16)),
        ("batch", Layout(data=16, micro_batch_size=32)),
        ("no-selective-recompute", Layout(data=16, recompute=RECOMPUTE_SELECTIVE)),
    ],
)
def test_each_rule_refuses_what_it_is_there_for(key: str, layout: Layout) -> None:
    assert refused_by(recipe_of(GPU_RECIPE), layout) == [key]


def test_fp16_is_for_gpus() -> None:
    assert refused_by(recipe_of(CPU_RECIPE, "training.precision=fp16"), CPU_LAYOUT) == ["fp16-needs-gpu"]
    assert refused_by(recipe_of(GPU_RECIPE, "training.precision=fp16"), GPU_LAYOUT) == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_runs_is_legal(stage: int) -> None:
    layout = Layout(data=16, micro_batch_size=4, zero_stage=stage, recompute=RECOMPUTE_FULL)
    assert refused_by(recipe_of(GPU_RECIPE), layout) == []


def test_rendering_touches_nothing_but_the_shipped_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rendered(GPU_LAYOUT)
    assert list(tmp_path.iterdir()) == []
