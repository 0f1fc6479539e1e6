"""Kinds of scripts: what each is told, what is searched for it, and what it cannot do."""

from __future__ import annotations

import pytest

from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.backends.deepspeed.megatron_deepspeed import TAKEN
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.types import Recipe
from support.backend_output import render, value_of, words_of
from support.recipes import recipe_of


def recipe_for(kind: str, *overrides: str, script_args: str = "[--mine]") -> Recipe:
    script = f"script: /home/me/train.py, script_args: {script_args}, script_kind: {kind}"
    return recipe_of("llama2-7b-deepspeed", f"backend={{name: deepspeed, {script}}}", *overrides)


def test_a_script_of_the_trainers_is_told_what_its_arguments_are_called() -> None:
    layout = Layout(data=16, micro_batch_size=2, zero_stage=3, recompute=RECOMPUTE_FULL)
    recipe = recipe_for("hugging-face", "training.save_interval=10", "training.checkpoint_path=/ckpt")
    words = words_of(recipe, layout)
    assert words[:2] == ["/home/me/train.py", "--mine"]
    arguments = dict(zip(words[2::2], words[3::2], strict=True))
    expected = {
        "--deepspeed": "$LLMLAUNCH_RUN_DIR/ds_config.json",
        "--per_device_train_batch_size": "2",
        "--gradient_accumulation_steps": "8",
        "--bf16": "True",
        "--gradient_checkpointing": "True",
        "--output_dir": "/ckpt",
        "--save_steps": "10",
    }
    assert expected.items() <= arguments.items()
    assert "--deepspeed_config" not in arguments


def test_the_trainer_stops_cosine_decay_at_a_minimum_and_no_other() -> None:
    cosine, linear = (
        recipe_for("hugging-face", "training.minimum_learning_rate=1.0e-5", f"training.learning_rate_decay={decay}")
        for decay in ("cosine", "linear")
    )
    words = words_of(cosine, Layout(data=16))
    assert value_of(words, "--lr_scheduler_kwargs") == '{"min_lr": 1e-05}'
    assert "cosine_with_min_lr" in words
    with pytest.raises(UserError, match="a minimum of cosine decay alone"):
        render(linear, Layout(data=16))


def test_pipelines_are_searched_with_zero_0_and_1() -> None:
    recipe = recipe_for("pipeline")
    assert {states.zero_stage for states in DeepSpeed().space(recipe).state_techniques} == {0, 1}
    plan = make_plan(setting_of(recipe, DeepSpeed()))
    assert plan.chosen is not None
    assert plan.chosen.layout.zero_stage == 1
    assert plan.chosen.layout.tensor == plan.chosen.layout.context == 1
    assert DeepSpeed().facts(recipe).pipeline_buffers == 2


INDEXED = "data={path: /data/mine_text_document}"


def test_megatron_deepspeed_is_told_in_the_words_of_its_parser() -> None:
    layout = Layout(tensor=2, pipeline=2, data=4, zero_stage=1, recompute=RECOMPUTE_FULL)
    recipe = recipe_for("megatron-deepspeed", INDEXED, "model=llama3-8b")
    words = words_of(recipe, layout)
    assert all(word.split("=")[0] in TAKEN for word in words[2:] if word.startswith("--"))
    for flag, value in (
        ("--zero-stage", "1"),
        ("--num-key-value-heads", "8"),
        ("--normalization", "rmsnorm"),
        ("--rotary-position-embeddings-theta", "500000"),
    ):
        assert value_of(words, flag) == value
    assert {"--use-rotary-position-embeddings", "--deepspeed-activation-checkpointing"} <= set(words)
    assert "--no-pipeline-parallel" not in words


def test_without_stages_megatron_deepspeed_makes_no_pipeline() -> None:
    words = words_of(recipe_for("megatron-deepspeed", INDEXED), Layout(context=2, data=8, zero_stage=1))
    assert "--no-pipeline-parallel" in words
    assert value_of(words, "--ds-sequence-parallel-size") == "2"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), r"data\.mock: Megatron-DeepSpeed reads indexed datasets alone"),
        ((INDEXED, "model=mixtral-8x7b"), r"model\.moe.*which Megatron-DeepSpeed's parser has not"),
    ],
)
def test_what_the_old_parser_has_not_is_refused_by_the_recipes_key(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        render(recipe_for("megatron-deepspeed", *overrides), Layout(data=16, zero_stage=1))


def test_only_a_script_has_a_kind() -> None:
    with pytest.raises(UserError, match="script_kind needs script"):
        recipe_of("llama2-7b-deepspeed", "backend={name: deepspeed, script_kind: pipeline}")


@pytest.mark.parametrize(
    ("kind", "script_args", "fused"),
    [
        ("hugging-face", "[--mine]", True),
        ("hugging-face", "[--optim, adamw_torch]", False),
        ("hugging-face", "[--optim=adamw_torch]", False),
        ("hugging-face", "[--optim, adamw_torch_fused]", True),
        ("own", "[--mine]", False),
    ],
)
def test_a_script_whose_optimizer_may_not_be_fused_is_priced_with_its_temporary(
    kind: str, script_args: str, fused: bool
) -> None:
    recipe = recipe_for(kind, script_args=script_args)
    assert DeepSpeed().facts(recipe).step_bytes_sharded[3] == (6.0 if fused else 8.0)
    measured = render(recipe, Layout(data=16, zero_stage=3)).measurement
    assert measured["implementation"]["fused_optimizer"] is fused
