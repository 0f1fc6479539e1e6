"""Kinds of scripts: what each is told, what is searched for it, and what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.argument import NodeVariable
from llmlaunch.backends.base import Rendered
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.backends.deepspeed.megatron_deepspeed import TAKEN
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns, Situation
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe


def recipe_of(kind: str, *overrides: str) -> Recipe:
    backend = f"backend={{name: deepspeed, script: /home/me/train.py, script_args: [--mine], script_kind: {kind}}}"
    return load_recipe(asset("recipes", "llama2-7b-deepspeed.yaml"), (backend, *overrides))


def rendered(kind: str, layout: Layout, *overrides: str) -> Rendered:
    return DeepSpeed().render(recipe_of(kind, *overrides), layout)


def words(result: Rendered) -> list[str]:
    return [f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word for word in result.program]


def config(result: Rendered) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(result.files["ds_config.json"])
    return loaded


def refused_by(recipe: Recipe, layout: Layout) -> list[str]:
    situation = Situation(LayoutColumns.of([layout]), recipe.model, recipe.workload, recipe.cluster, recipe.nodes)
    return [rule.key for rule in DeepSpeed().rules(recipe) if not bool(np.all(rule.allows(situation)))]


def test_a_script_of_the_trainers_is_told_what_its_arguments_are_called() -> None:
    layout = Layout(data=16, micro_batch_size=2, zero_stage=3, recompute=RECOMPUTE_FULL)
    said = words(rendered("hugging-face", layout, "training.save_interval=10", "training.checkpoint_path=/ckpt"))
    assert said[:2] == ["/home/me/train.py", "--mine"]
    told = dict(zip(said[2::2], said[3::2], strict=True))
    assert told["--deepspeed"] == "$LLMLAUNCH_RUN_DIR/ds_config.json"
    assert (told["--per_device_train_batch_size"], told["--gradient_accumulation_steps"]) == ("2", "8")
    assert (told["--bf16"], told["--gradient_checkpointing"]) == ("True", "True")
    assert (told["--output_dir"], told["--save_steps"]) == ("/ckpt", "10")
    assert "--deepspeed_config" not in told


def test_the_trainer_stops_cosine_decay_at_a_minimum_and_no_other() -> None:
    least = "training.minimum_learning_rate=1.0e-5"
    decay = "training.learning_rate_decay=cosine"
    said = words(rendered("hugging-face", Layout(data=16), least, decay))
    assert said[said.index("--lr_scheduler_kwargs") + 1] == '{"min_lr": 1e-05}'
    assert "cosine_with_min_lr" in said
    with pytest.raises(UserError, match="a minimum of cosine decay alone"):
        rendered("hugging-face", Layout(data=16), least, "training.learning_rate_decay=linear")


def test_the_trainers_config_leaves_nothing_to_auto() -> None:
    assert b"auto" not in rendered("hugging-face", Layout(data=16, zero_stage=3)).files["ds_config.json"]


def test_the_trainer_has_no_word_for_sequence_parallelism() -> None:
    assert refused_by(recipe_of("hugging-face"), Layout(context=2, data=8)) == ["trainer-context"]
    assert refused_by(recipe_of("hugging-face"), Layout(tensor=2, data=8)) == []


def test_a_script_with_a_pipeline_is_told_its_stages() -> None:
    layout = Layout(pipeline=4, data=4, micro_batch_size=2, zero_stage=1, recompute=RECOMPUTE_FULL)
    said = config(rendered("pipeline", layout))
    assert said["pipeline"] == {"stages": 4, "activation_checkpoint_interval": 1}
    assert said["train_batch_size"] == 256 == 2 * said["gradient_accumulation_steps"] * 4


@pytest.mark.parametrize(
    ("key", "layout"),
    [
        ("pipeline-zero", Layout(pipeline=2, data=8, zero_stage=2)),
        ("pipeline-bf16", Layout(pipeline=2, data=8)),
        ("pipeline-layers", Layout(pipeline=16, zero_stage=1)),
        ("tensor", Layout(pipeline=2, tensor=2, data=4, zero_stage=1)),
        ("context", Layout(pipeline=2, context=2, data=4, zero_stage=1)),
        ("virtual-pipeline", Layout(pipeline=2, virtual_pipeline=2, data=8, zero_stage=1)),
    ],
)
def test_each_rule_of_pipelines_refuses_what_it_is_there_for(key: str, layout: Layout) -> None:
    assert key in refused_by(recipe_of("pipeline", "model={base: llama2-7b, num_layers: 28}"), layout)


def test_pipelines_are_searched_with_zero_0_and_1() -> None:
    recipe = recipe_of("pipeline")
    assert {held.zero_stage for held in DeepSpeed().space(recipe).state_techniques} == {0, 1}
    plan = make_plan(setting_of(recipe, DeepSpeed()))
    assert plan.chosen is not None
    assert plan.chosen.layout.zero_stage == 1
    assert plan.chosen.layout.tensor == plan.chosen.layout.context == 1
    assert DeepSpeed().facts(recipe).pipeline_buffers == 2


INDEXED = "data={path: /data/mine_text_document}"


def test_megatron_deepspeed_is_told_in_the_words_of_its_parser() -> None:
    layout = Layout(tensor=2, pipeline=2, data=4, zero_stage=1, recompute=RECOMPUTE_FULL)
    result = rendered("megatron-deepspeed", layout, INDEXED, "model=llama3-8b")
    said = words(result)
    assert all(word.split("=")[0] in TAKEN for word in said[2:] if word.startswith("--"))
    told = {flag: said[place + 1] for place, flag in enumerate(said[:-1]) if flag.startswith("--")}
    assert (told["--zero-stage"], told["--num-key-value-heads"], told["--normalization"]) == ("1", "8", "rmsnorm")
    assert told["--rotary-position-embeddings-theta"] == "500000"
    assert {"--use-rotary-position-embeddings", "--deepspeed-activation-checkpointing"} <= set(said)
    assert "--no-pipeline-parallel" not in said
    assert "tensor_parallel" not in config(result)
    assert config(result)["train_batch_size"] == 256


def test_without_stages_megatron_deepspeed_makes_no_pipeline() -> None:
    layout = Layout(context=2, data=8, zero_stage=1)
    said = words(rendered("megatron-deepspeed", layout, INDEXED))
    assert "--no-pipeline-parallel" in said
    assert said[said.index("--ds-sequence-parallel-size") + 1] == "2"


def test_what_the_old_parser_has_not_is_refused_by_the_recipes_key() -> None:
    layout = Layout(data=16, zero_stage=1)
    with pytest.raises(UserError, match=r"data\.mock: Megatron-DeepSpeed reads indexed datasets alone"):
        rendered("megatron-deepspeed", layout)
    with pytest.raises(UserError, match=r"model\.moe.*which Megatron-DeepSpeed's parser has not"):
        rendered("megatron-deepspeed", layout, INDEXED, "model=mixtral-8x7b")


@pytest.mark.parametrize(
    ("key", "layout"),
    [
        ("megatron-pipeline-zero", Layout(pipeline=2, data=8, zero_stage=2)),
        ("megatron-heads", Layout(tensor=16)),
        ("megatron-query-groups", Layout(tensor=16)),
        ("megatron-layers", Layout(pipeline=16)),
        ("megatron-ulysses-heads", Layout(context=16)),
        ("megatron-ulysses-alone", Layout(context=2, pipeline=2, data=4)),
    ],
)
def test_each_rule_of_megatron_deepspeed_refuses_what_it_is_there_for(key: str, layout: Layout) -> None:
    model = "model={base: llama2-7b, num_layers: 28, num_attention_heads: 8, num_query_groups: 8, head_dim: 512}"
    assert key in refused_by(recipe_of("megatron-deepspeed", INDEXED, model), layout)


def test_a_script_of_another_kind_has_no_pipeline() -> None:
    for kind in ("own", "hugging-face"):
        assert "pipeline" in refused_by(recipe_of(kind), Layout(pipeline=2, data=8, zero_stage=1))


def test_only_a_script_has_a_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="script_kind needs script"):
        load_recipe(asset("recipes", "llama2-7b-deepspeed.yaml"), ("backend={name: deepspeed, script_kind: pipeline}",))


@pytest.mark.parametrize(
    ("kind", "words", "fused"),
    [
        ("hugging-face", "[--mine]", True),
        ("hugging-face", "[--optim, adamw_torch]", False),
        ("hugging-face", "[--optim=adamw_torch]", False),
        ("hugging-face", "[--optim, adamw_torch_fused]", True),
        ("own", "[--mine]", False),
    ],
)
def test_a_script_whose_optimizer_may_not_be_fused_is_priced_with_its_temporary(
    kind: str, words: str, fused: bool
) -> None:
    backend = f"backend={{name: deepspeed, script: /home/me/train.py, script_args: {words}, script_kind: {kind}}}"
    recipe = load_recipe(asset("recipes", "llama2-7b-deepspeed.yaml"), (backend,))
    assert DeepSpeed().facts(recipe).step_bytes_sharded[3] == (6.0 if fused else 8.0)
    measured = DeepSpeed().render(recipe, Layout(data=16, zero_stage=3)).measurement
    assert measured["implementation"]["fused_optimizer"] is fused
