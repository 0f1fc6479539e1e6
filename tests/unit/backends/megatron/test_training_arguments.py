"""Formats of checkpoints, and where TensorBoard's files go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.backends.checkpoints import reshards, save_seconds
from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from support.backend_output import value_of, words_of
from support.recipes import recipe_of

SAVING = ("training.save_interval=100", "training.checkpoint_path=/ckpt")
OLD = ("training.checkpoint_format=torch", "layout.zero_stage=0")
WHOLE = Layout(8, 8, data=8, sequence_parallel=1)


def saving(*overrides: str) -> Recipe:
    return recipe_of("llama3-70b", *SAVING, *overrides)


@pytest.mark.parametrize(
    ("overrides", "layout", "checkpoint_format"),
    [
        ((), WHOLE, "torch_dist"),
        (OLD, WHOLE, "torch"),
        (
            ("layout.zero_stage=3", "training.checkpoint_format=fsdp_dtensor"),
            Layout(data=512, zero_stage=3),
            "fsdp_dtensor",
        ),
    ],
)
def test_each_layout_has_its_format_and_a_recipe_may_say_another(
    overrides: tuple[str, ...], layout: Layout, checkpoint_format: str
) -> None:
    assert value_of(words_of(saving(*overrides), layout), "--ckpt-format") == checkpoint_format


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("training.checkpoint_format=torch_dcp",), "torch_dcp needs --use-torch-fsdp2"),
        (("training.checkpoint_format=fsdp_dtensor",), "fsdp_dtensor needs zero_stage 2 or 3"),
        (("training.checkpoint_format=torch",), "torch needs zero_stage: 0 pinned"),
        (("training.checkpoint_format=torch", "layout.zero_stage=[0, 1]"), "torch needs zero_stage: 0 pinned"),
        (("training.checkpoint_format=torch_dist", "layout.zero_stage=3"), "take fsdp_dtensor alone"),
    ],
)
def test_a_format_that_does_not_go_with_the_layout_is_refused(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=r"training\.checkpoint_format: ") as refused:
        MegatronLM().rules(saving(*overrides))
    assert why in str(refused.value)


def test_the_old_format_is_of_one_cut_and_written_by_few() -> None:
    old, new = saving(*OLD), saving()
    other = replace(WHOLE, pipeline=4, data=16)
    assert reshards(new, WHOLE, other)
    assert not reshards(old, WHOLE, other)
    assert reshards(old, WHOLE, replace(WHOLE, context=2, data=4))
    assert save_seconds(old, WHOLE) > save_seconds(new, WHOLE)


def test_tensorboard_gets_its_folder() -> None:
    assert value_of(words_of(saving("training.tensorboard=/tb"), WHOLE), "--tensorboard-dir") == "/tb"


@pytest.mark.parametrize(("key", "value"), [("checkpoint_format", "torch"), ("tensorboard", "/tb")])
def test_both_are_words_of_megatron(key: str, value: str) -> None:
    with pytest.raises(UserError, match=f"training.{key}: is a word of megatron-lm"):
        recipe_of("quickstart", *SAVING, f"training.{key}={value}")
