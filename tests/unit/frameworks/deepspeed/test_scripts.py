"""Kinds of scripts: what each is told, what is searched for it, and what it cannot do."""

from __future__ import annotations

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.types import Recipe
from support.backend_output import check_flags, render, value_of, words_of
from support.recipes import recipe_of


def recipe_for(kind: str, *overrides: str, script_args: str = "[--mine]") -> Recipe:
    script = f"script: /home/me/train.py, script_args: {script_args}, script_kind: {kind}"
    return recipe_of("llama2-7b-deepspeed", f"backend={{name: deepspeed, {script}}}", *overrides)


SAVING = ("training.save_interval=10", "training.checkpoint_path=/ckpt")

# Kind of script and overrides, layout, the flags said and those that are not.
SAID: dict[str, tuple[str, tuple[str, ...], Layout, str, str]] = {
    "the Trainer's arguments": (
        *("hugging-face", SAVING, Layout(data=16, micro_batch_size=2, zero_stage=3, recompute=RECOMPUTE_FULL)),
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --bf16 True --gradient_checkpointing True "
        "--output_dir /ckpt --save_steps 10",
        "--deepspeed_config",
    ),
    "how many checkpoints stay, which is the Trainer's affair": (
        *("hugging-face", (*SAVING, "training.keep_checkpoints=3"), Layout(data=16, micro_batch_size=2)),
        "--save_steps 10 --save_total_limit 3",
        "--keep-checkpoints",
    ),
    "a cosine decay of the Trainer's, which it stops at a minimum": (
        "hugging-face",
        ("training.minimum_learning_rate=1.0e-5", "training.learning_rate_decay=cosine"),
        *(Layout(data=16), '--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr": 1e-05}', ""),
    ),
}


@pytest.mark.parametrize(("kind", "overrides", "layout", "said", "unsaid"), SAID.values(), ids=SAID)
def test_a_script_is_told_the_plan_after_its_own_words(
    kind: str, overrides: tuple[str, ...], layout: Layout, said: str, unsaid: str
) -> None:
    recipe = recipe_for(kind, *overrides)
    words = words_of(recipe, layout)
    assert words[:2] == ["/home/me/train.py", "--mine"]
    check_flags(recipe, layout, said, unsaid)
    assert value_of(words, "--deepspeed") == "$LLMLAUNCH_RUN_DIR/ds_config.json"


def test_the_trainer_stops_no_other_decay_at_a_minimum() -> None:
    decay = ("training.minimum_learning_rate=1.0e-5", "training.learning_rate_decay=linear")
    with pytest.raises(UserError, match="a minimum of cosine decay alone"):
        render(recipe_for("hugging-face", *decay), Layout(data=16))


EVALUATION = "training.evaluation={interval: 20, iterations: 3}"


def test_the_trainer_evaluates_batches_as_large_as_those_it_trains_on() -> None:
    rendered = render(recipe_for("hugging-face", EVALUATION), Layout(data=16, micro_batch_size=2))
    words = [str(word) for word in rendered.program]
    assert (value_of(words, "--eval_strategy"), value_of(words, "--eval_steps")) == ("steps", "20")
    assert value_of(words, "--per_device_eval_batch_size") == "2"
    assert "goes through all validation data each time" in rendered.notes[0]


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("own", (EVALUATION,), "evaluates by its own arguments"),
        ("pipeline", (EVALUATION,), "evaluates by its own arguments"),
        ("hugging-face", (EVALUATION, "layout.loss=fused_linear"), "writes all logits out where the model does not"),
        ("hugging-face", (EVALUATION, "data={path: /a, validation: /b}"), "has its data in its own arguments"),
    ],
)
def test_an_evaluation_that_a_script_does_not_do_as_priced_is_refused(
    kind: str, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        render(recipe_for(kind, *overrides), Layout(data=16))


def test_pipelines_are_searched_with_zero_0_and_1() -> None:
    recipe = recipe_for("pipeline")
    assert {states.zero_stage for states in DeepSpeed().space(recipe).state_techniques} == {0, 1}
    plan = make_plan(setting_of(recipe, DeepSpeed()))
    assert plan.chosen is not None
    assert plan.chosen.layout.zero_stage == 1
    assert plan.chosen.layout.tensor == plan.chosen.layout.context == 1
    assert DeepSpeed().facts(recipe).exchange.pipeline_buffers == 2


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("backend.script_kind", "backend.script_kind=megatron-deepspeed"),
        ("backend", "backend=megatron-deepspeed"),
        ("backend.name", "backend={name: megatron-deepspeed}"),
    ],
)
def test_a_recipe_of_megatron_deepspeed_is_told_that_its_trainer_is_not_known(key: str, word: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe_for("own", word)
    message = str(caught.value)
    assert f"{key}: must be one of" in message
    assert "Megatron-DeepSpeed is not a trainer that llmlaunch prices or renders" in message
    assert "`llmlaunch observe --` before its command measures it" in message
    assert len(message.splitlines()) == 1


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
    assert DeepSpeed().facts(recipe).step.step_bytes_sharded[3] == (6.0 if fused else 8.0)
